"""Fix the tokens of masked positions: static quota, or every position above a confidence threshold."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def commit(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
) -> torch.Tensor:
    """Commit candidates of each lane; ``tokens`` and ``masked`` are updated in place.

    With ``q = min(quota, masks left)`` and ``over`` the masked positions whose confidence exceeds the
    threshold: if at least q positions are over, all of those are committed; else the q most confident masked
    positions are, the lowest position first on ties. A position that is not masked never changes.

    Source: low-confidence remasking (LLaDA, arXiv 2502.09992) for the quota, confidence-aware parallel
    decoding (Fast-dLLM, arXiv 2505.22618) for the threshold.

    Args:
        tokens: int64 [N, B]; this and the next three with unit stride in the last dimension.
        masked: bool [N, B].
        candidate: int64 [N, B], the token to commit at each position.
        confidence: float32 [N, B].
        quota: int32 [N], tokens to commit in this step at least.
        threshold: float32 [N]; +inf switches the threshold off.

    Returns:
        int32 [N]: masks left, or -1 for a lane with a NaN confidence at a masked position; nothing of such a
        lane is committed.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    if not tokens.shape == masked.shape == candidate.shape == confidence.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, masked {tuple(masked.shape)}, candidate {tuple(candidate.shape)} "
            f"and confidence {tuple(confidence.shape)} must have one shape"
        )
    if quota.shape != tokens.shape[:1] or threshold.shape != tokens.shape[:1]:
        raise ValueError(
            f"quota {tuple(quota.shape)} and threshold {tuple(threshold.shape)} need one value for each of "
            f"the {tokens.shape[0]} lanes"
        )
    need_unit_stride(tokens=tokens, masked=masked, candidate=candidate, confidence=confidence)
    status: torch.Tensor = implementation("commit", tokens.device.type)(
        tokens, masked, candidate, confidence, quota, threshold
    )
    return status

"""Fix the tokens of masked positions: static quota, or every position above a confidence threshold."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def commit(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    slots: torch.Tensor,
    best: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
    window: torch.Tensor | None = None,
) -> torch.Tensor:
    """Commit candidates in row ``slots[r]`` of the tables, for every r; the tables are updated in place.

    With ``q = min(quota, masks left)`` and ``over`` the masked positions whose confidence exceeds the
    threshold: if at least q positions are over, all of those are committed; else the q most confident masked
    positions are, the lowest position first on ties. A position that is not masked never changes. The draft
    becomes the tokens, with ``best`` where a mask is left.

    With ``window`` only the masked positions of one window count: that of the slot's first masked position.
    "Masks left" in q are then those of that window.

    Several r may name one slot if it has no mask: nothing of it changes but its draft, to its tokens.

    Source: low-confidence remasking (LLaDA, arXiv 2502.09992) for the quota, confidence-aware parallel
    decoding (Fast-dLLM, arXiv 2505.22618) for the threshold, sub-blocks (Fast-dLLM v2, arXiv 2509.26328) for
    windows.

    Args:
        tokens: int64 [S, B], the table of tokens; every 2-D argument has unit stride in the last dimension.
        masked: bool [S, B].
        draft: int64 [S, B].
        slots: int64 [R], rows of the tables.
        best: int64 [R, B], the arg-max token at each position.
        candidate: int64 [R, B], the token to commit at each position.
        confidence: float32 [R, B].
        quota: int64 [R], tokens to commit in this step at least.
        threshold: float32 [S]; +inf switches the threshold off.
        window: int64 [S, B], the number of each position's window, not falling along a slot. None for one
            window.

    Returns:
        int64 [R, B + 1]. First the masks left, or -1 for a NaN confidence at a masked position; nothing of
        such a row is committed. Then the token of each position, or -1 - ``best`` where it is masked still.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    num_slots, block_length = tokens.shape
    num_rows = slots.numel()
    if not tokens.shape == masked.shape == draft.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, masked {tuple(masked.shape)} and draft {tuple(draft.shape)} must "
            "have one shape"
        )
    if not best.shape == candidate.shape == confidence.shape == (num_rows, block_length):
        raise ValueError(
            f"best {tuple(best.shape)}, candidate {tuple(candidate.shape)} and confidence "
            f"{tuple(confidence.shape)} must be ({num_rows}, {block_length})"
        )
    if quota.shape != (num_rows,) or threshold.shape != (num_slots,):
        raise ValueError(
            f"quota {tuple(quota.shape)} needs one value for each of {num_rows} rows, threshold "
            f"{tuple(threshold.shape)} one for each of {num_slots} slots"
        )
    if window is not None and window.shape != tokens.shape:
        raise ValueError(f"window {tuple(window.shape)} must have the shape of tokens {tuple(tokens.shape)}")
    need_unit_stride(
        tokens=tokens, masked=masked, draft=draft, best=best, candidate=candidate, confidence=confidence
    )
    if window is not None:
        need_unit_stride(window=window)
    report: torch.Tensor = implementation("commit", tokens.device.type)(
        tokens, masked, draft, slots, best, candidate, confidence, quota, threshold, window
    )
    return report

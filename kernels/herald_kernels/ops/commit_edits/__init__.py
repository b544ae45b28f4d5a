"""`commit` for blocks whose committed tokens may still change."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def commit_edits(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    edits: torch.Tensor,
    edit_threshold: torch.Tensor,
    slots: torch.Tensor,
    opening: torch.Tensor,
    best: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
    mask_id: int,
) -> torch.Tensor:
    """As `commit`, and replace tokens that were committed before, where a slot's block may be edited.

    In such a slot a position is edited that was committed when the step began, is not the prompt's, and whose
    candidate is another token with a confidence above ``edit_threshold``. A candidate that is the mask never
    replaces a token. The block goes on after its last mask until a step that began without masks edits
    nothing, or until as many such steps were made as ``edits`` allows.

    Slots with an ``edit_threshold`` of +inf are treated as `commit` treats them, bit for bit.

    Source: token editing of LLaDA2.1, arXiv 2602.08676.

    Args:
        tokens, masked, draft: see `commit`.
        edits: int64 [S, 3], contiguous: prompt tokens at the head of the slot's block (set to 0 by a step
            that opens the next one), steps so far that began without masks (counted here), and how many of
            these a block may take.
        edit_threshold: float32 [S]; +inf where nothing is edited.
        slots: int64 [R]; several may name one slot if it has no mask and is not edited.
        opening: int64 [R], 1 where the slot's block began with this step.
        best, candidate, confidence, quota, threshold: see `commit`.
        mask_id: token id of the mask.

    Returns:
        As `commit`. The first column is 1 where no mask is left but the block goes on, and -1 also for a NaN
        confidence at a position that might be edited.

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
    if edits.shape != (num_slots, 3) or not edits.is_contiguous() or edit_threshold.shape != (num_slots,):
        raise ValueError(
            f"edits {tuple(edits.shape)} must be contiguous ({num_slots}, 3), edit_threshold "
            f"{tuple(edit_threshold.shape)} ({num_slots},)"
        )
    if not best.shape == candidate.shape == confidence.shape == (num_rows, block_length):
        raise ValueError(
            f"best {tuple(best.shape)}, candidate {tuple(candidate.shape)} and confidence "
            f"{tuple(confidence.shape)} must be ({num_rows}, {block_length})"
        )
    if not quota.shape == opening.shape == (num_rows,) or threshold.shape != (num_slots,):
        raise ValueError(
            f"quota {tuple(quota.shape)} and opening {tuple(opening.shape)} need one value for each of "
            f"{num_rows} rows, threshold {tuple(threshold.shape)} one for each of {num_slots} slots"
        )
    need_unit_stride(
        tokens=tokens, masked=masked, draft=draft, best=best, candidate=candidate, confidence=confidence
    )
    report: torch.Tensor = implementation("commit_edits", tokens.device.type)(
        tokens,
        masked,
        draft,
        edits,
        edit_threshold,
        slots,
        opening,
        best,
        candidate,
        confidence,
        quota,
        threshold,
        mask_id,
    )
    return report

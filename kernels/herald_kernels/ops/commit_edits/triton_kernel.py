# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `commit_edits`: one program a row, ranks by comparing every pair of positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["mask_id"])
def _commit_edits_kernel(
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
    report,
    mask_id,
    tokens_stride,
    masked_stride,
    draft_stride,
    best_stride,
    candidate_stride,
    confidence_stride,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < B
    open_before = tl.load(masked + slot * masked_stride + i, mask=inside, other=0) != 0
    conf = tl.load(confidence + row * confidence_stride + i, mask=inside, other=0.0)
    before = tl.load(tokens + slot * tokens_stride + i, mask=inside, other=0)
    drawn = tl.load(candidate + row * candidate_stride + i, mask=inside, other=0)
    guess = tl.load(best + row * best_stride + i, mask=inside, other=0)
    above = tl.load(edit_threshold + slot)
    head = tl.where(tl.load(opening + row) > 0, 0, tl.load(edits + slot * 3))
    done, most = tl.load(edits + slot * 3 + 1), tl.load(edits + slot * 3 + 2)

    may_edit = above < float("inf")
    editable = inside & (open_before == 0) & (i >= tl.where(may_edit, head, B))
    left = tl.sum(open_before.to(tl.int32), 0)
    num_bad = tl.sum(((open_before | editable) & (conf != conf)).to(tl.int32), 0)

    mine, other = conf[:, None], conf[None, :]
    ahead = (other > mine) | ((other == mine) & (i[None, :] < i[:, None]))
    rank = tl.sum((ahead & open_before[None, :]).to(tl.int32), 1)
    wanted = tl.minimum(tl.load(quota + row), left)
    over = open_before & (conf > tl.load(threshold + slot))
    num_over = tl.sum(over.to(tl.int32), 0)

    # A row with a NaN changes nothing: its reach is empty.
    reach = i < tl.where(num_bad > 0, 0, B)
    chosen = tl.where(num_over >= wanted, over, open_before & (rank < wanted)) & reach
    changed = editable & (drawn != before) & (drawn != mask_id) & (conf > above) & reach
    after = tl.where(chosen | changed, drawn, before)
    open_after = open_before & (chosen == 0)
    num_open = tl.sum(open_after.to(tl.int32), 0)
    num_changed = tl.sum(changed.to(tl.int32), 0)
    done = tl.where(left > 0, 0, done + 1)
    goes_on = may_edit & (done < most) & ((left > 0) | (num_changed > 0))
    # Every read of the tables lies before the first write.
    tl.debug_barrier()
    tl.store(tokens + slot * tokens_stride + i, drawn, mask=chosen | changed)
    tl.store(masked + slot * masked_stride + i, tl.zeros([BLOCK], tl.uint8), mask=chosen)
    tl.store(draft + slot * draft_stride + i, tl.where(open_after, guess, after), mask=inside)
    tl.store(edits + slot * 3, head, mask=may_edit)
    tl.store(edits + slot * 3 + 1, done, mask=may_edit)
    out = report + row * (B + 1)
    status = tl.where(num_open > 0, num_open, goes_on.to(tl.int32))
    tl.store(out, tl.where(num_bad > 0, -1, status).to(tl.int64))
    tl.store(out + 1 + i, tl.where(open_after, -1 - guess, after), mask=inside)


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
    """See `herald_kernels.commit_edits`."""
    num_rows, block_length = confidence.shape
    report = torch.empty(num_rows, block_length + 1, dtype=torch.int64, device=tokens.device)
    if num_rows:
        flags = masked.view(torch.uint8)
        _commit_edits_kernel[(num_rows,)](
            tokens,
            flags,
            draft,
            edits,
            edit_threshold.contiguous(),
            slots.contiguous(),
            opening.contiguous(),
            best,
            candidate,
            confidence,
            quota.contiguous(),
            threshold.contiguous(),
            report,
            mask_id,
            tokens.stride(0),
            flags.stride(0),
            draft.stride(0),
            best.stride(0),
            candidate.stride(0),
            confidence.stride(0),
            B=block_length,
            BLOCK=triton.next_power_of_2(block_length),
            num_warps=1 if block_length <= 16 else 4,
        )
    return report

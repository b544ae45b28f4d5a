# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `commit`: one program a row, ranks by comparing every pair of positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _commit_kernel(
    tokens,
    masked,
    draft,
    slots,
    best,
    candidate,
    confidence,
    quota,
    threshold,
    window,
    report,
    tokens_stride,
    masked_stride,
    draft_stride,
    best_stride,
    candidate_stride,
    confidence_stride,
    window_stride,
    WINDOWS: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < B
    still_open = tl.load(masked + slot * masked_stride + i, mask=inside, other=0) != 0
    conf = tl.load(confidence + row * confidence_stride + i, mask=inside, other=0.0)
    before = tl.load(tokens + slot * tokens_stride + i, mask=inside, other=0)

    mine, other = conf[:, None], conf[None, :]
    ahead = (other > mine) | ((other == mine) & (i[None, :] < i[:, None]))
    asked = still_open
    if WINDOWS:
        own = tl.load(window + slot * window_stride + i, mask=inside, other=0)
        # Windows stand in order, so the first masked position is in the least of them.
        last = tl.max(own, 0)
        asked = still_open & (own == tl.min(tl.where(still_open, own, last), 0))
    rank = tl.sum((ahead & asked[None, :]).to(tl.int32), 1)
    left = tl.sum(still_open.to(tl.int32), 0)
    wanted = tl.minimum(tl.load(quota + row), tl.sum(asked.to(tl.int32), 0))
    over = asked & (conf > tl.load(threshold + slot))
    num_over = tl.sum(over.to(tl.int32), 0)
    num_bad = tl.sum((still_open & (conf != conf)).to(tl.int32), 0)

    # A row with a NaN commits nothing: its reach is empty.
    reach = tl.where(num_bad > 0, 0, B)
    chosen = tl.where(num_over >= wanted, over, asked & (rank < wanted)) & (i < reach)
    drawn = tl.load(candidate + row * candidate_stride + i, mask=chosen, other=0)
    after = tl.where(chosen, drawn, before)
    open_after = still_open & (chosen == 0)
    guess = tl.load(best + row * best_stride + i, mask=open_after, other=0)
    # Every read of the tables lies before the first write.
    tl.debug_barrier()
    tl.store(tokens + slot * tokens_stride + i, drawn, mask=chosen)
    tl.store(masked + slot * masked_stride + i, tl.zeros([BLOCK], tl.uint8), mask=chosen)
    tl.store(draft + slot * draft_stride + i, tl.where(open_after, guess, after), mask=inside)
    out = report + row * (B + 1)
    status = tl.where(num_bad > 0, -1, left - tl.sum(chosen.to(tl.int32), 0))
    tl.store(out, status.to(tl.int64))
    tl.store(out + 1 + i, tl.where(open_after, -1 - guess, after), mask=inside)


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
    window: torch.Tensor | None,
) -> torch.Tensor:
    """See `herald_kernels.commit`."""
    num_rows, block_length = confidence.shape
    report = torch.empty(num_rows, block_length + 1, dtype=torch.int64, device=tokens.device)
    if num_rows:
        flags = masked.view(torch.uint8)
        _commit_kernel[(num_rows,)](
            tokens,
            flags,
            draft,
            slots.contiguous(),
            best,
            candidate,
            confidence,
            quota.contiguous(),
            threshold.contiguous(),
            tokens if window is None else window,
            report,
            tokens.stride(0),
            flags.stride(0),
            draft.stride(0),
            best.stride(0),
            candidate.stride(0),
            confidence.stride(0),
            0 if window is None else window.stride(0),
            WINDOWS=window is not None,
            B=block_length,
            BLOCK=triton.next_power_of_2(block_length),
            num_warps=1 if block_length <= 16 else 4,
        )
    return report

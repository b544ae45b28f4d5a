# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `commit`: one program a lane, ranks by comparing every pair of positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _commit_kernel(
    tokens,
    masked,
    candidate,
    confidence,
    quota,
    threshold,
    status,
    tokens_stride,
    masked_stride,
    candidate_stride,
    confidence_stride,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < B
    still_open = tl.load(masked + lane * masked_stride + i, mask=inside, other=0) != 0
    conf = tl.load(confidence + lane * confidence_stride + i, mask=inside, other=0.0)

    mine, other = conf[:, None], conf[None, :]
    ahead = (other > mine) | ((other == mine) & (i[None, :] < i[:, None]))
    rank = tl.sum((ahead & still_open[None, :]).to(tl.int32), 1)
    left = tl.sum(still_open.to(tl.int32), 0)
    wanted = tl.minimum(tl.load(quota + lane), left)
    over = still_open & (conf > tl.load(threshold + lane))
    num_over = tl.sum(over.to(tl.int32), 0)
    num_bad = tl.sum((still_open & (conf != conf)).to(tl.int32), 0)

    # A lane with a NaN commits nothing: its reach is empty.
    reach = tl.where(num_bad > 0, 0, B)
    chosen = tl.where(num_over >= wanted, over, still_open & (rank < wanted)) & (i < reach)
    drawn = tl.load(candidate + lane * candidate_stride + i, mask=chosen, other=0)
    # Every read of `masked` lies before the first write.
    tl.debug_barrier()
    tl.store(tokens + lane * tokens_stride + i, drawn, mask=chosen)
    tl.store(masked + lane * masked_stride + i, tl.zeros([BLOCK], tl.uint8), mask=chosen)
    tl.store(status + lane, tl.where(num_bad > 0, -1, left - tl.sum(chosen.to(tl.int32), 0)))


def commit(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
) -> torch.Tensor:
    """See `herald_kernels.commit`."""
    num_lanes, block_length = tokens.shape
    status = torch.empty(num_lanes, dtype=torch.int32, device=tokens.device)
    if num_lanes:
        flags = masked.view(torch.uint8)
        _commit_kernel[(num_lanes,)](
            tokens,
            flags,
            candidate,
            confidence,
            quota.contiguous(),
            threshold.contiguous(),
            status,
            tokens.stride(0),
            flags.stride(0),
            candidate.stride(0),
            confidence.stride(0),
            B=block_length,
            BLOCK=triton.next_power_of_2(block_length),
            num_warps=1 if block_length <= 16 else 4,
        )
    return status

# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `open_blocks`: one program a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["mask_id"])
def _open_kernel(
    tokens,
    masked,
    draft,
    closed,
    slots,
    opening,
    mask_id,
    tokens_stride,
    masked_stride,
    draft_stride,
    closed_stride,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(opening + row) == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < B
    before = tl.load(tokens + slot * tokens_stride + i, mask=inside, other=0)
    fresh = tl.zeros([BLOCK], tl.int64) + mask_id
    tl.store(closed + slot * closed_stride + i, before, mask=inside)
    tl.store(tokens + slot * tokens_stride + i, fresh, mask=inside)
    tl.store(draft + slot * draft_stride + i, fresh, mask=inside)
    tl.store(masked + slot * masked_stride + i, tl.full([BLOCK], 1, tl.uint8), mask=inside)


def open_blocks(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    closed: torch.Tensor,
    slots: torch.Tensor,
    opening: torch.Tensor,
    mask_id: int,
) -> None:
    """See `herald_kernels.open_blocks`."""
    block_length = tokens.shape[1]
    flags = masked.view(torch.uint8)
    _open_kernel[(slots.numel(),)](
        tokens,
        flags,
        draft,
        closed,
        slots.contiguous(),
        opening.contiguous(),
        mask_id,
        tokens.stride(0),
        flags.stride(0),
        draft.stride(0),
        closed.stride(0),
        B=block_length,
        BLOCK=triton.next_power_of_2(block_length),
        num_warps=1,
    )

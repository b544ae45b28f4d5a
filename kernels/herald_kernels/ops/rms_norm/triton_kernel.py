# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `rms_norm`: one program a row, which stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from herald_kernels.ops import tiles


@triton.jit
def _rms_norm_kernel(
    hidden, weight, out, eps, stride, D: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < D
    value = tl.load(hidden + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    if WEIGHT:
        normed *= tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + col, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `herald_kernels.rms_norm`."""
    num_rows, width = hidden.shape
    out = torch.empty(num_rows, width, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(num_rows,)](
            hidden,
            hidden if weight is None else weight,
            out,
            eps,
            hidden.stride(0),
            D=width,
            BLOCK=block,
            WEIGHT=weight is not None,
            num_warps=min(tiles.RMS_NORM_WARPS, max(1, block // 256)),
        )
    return out

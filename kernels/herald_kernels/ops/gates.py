# mypy: disable-error-code="no-untyped-def"
"""What the kernels of gated MLPs repeat: the gate that opens, and its product with the values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from herald_kernels.ops import tiles


@triton.jit
def open_gate(gate, GELU: tl.constexpr):
    """SiLU of float32 values, or GELU in its tanh form."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(a) = 1 - 2 / (exp(2 a) + 1), exact at both ends
        opened = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        opened = gate / (1.0 + tl.exp(-gate))
    return opened


@triton.jit(do_not_specialize=["num_parts"])
def _gate_mul_kernel(
    gate_up, out, num_parts, stride, D: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    row = (tl.program_id(0) // num_parts).to(tl.int64)
    col = (tl.program_id(0) % num_parts) * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    source = gate_up + row * stride + col
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + D, mask=inside, other=0.0).to(tl.float32)
    opened = open_gate(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * D + col, (opened * up).to(out.dtype.element_ty), mask=inside)


def gate_mul(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """Opened gates times values, [T, D] of ``gate_up`` [T, 2 * D]: one program a part of a row."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows and width:
        block = min(tiles.SILU_MUL.size, triton.next_power_of_2(width))
        num_parts = triton.cdiv(width, block)
        _gate_mul_kernel[(num_rows * num_parts,)](
            gate_up,
            out,
            num_parts,
            gate_up.stride(0),
            D=width,
            BLOCK=block,
            GELU=gelu,
            num_warps=tiles.SILU_MUL.num_warps,
        )
    return out

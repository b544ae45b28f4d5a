"""The gate of a SwiGLU MLP."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_gates


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` from the joined projection; the gate is rounded before it multiplies, as in torch.

    Source: Shazeer 2020, arXiv 2002.05202.

    Args:
        gate_up: [T, 2 * D], gate then up, unit stride in the last dimension.

    Returns:
        [T, D] of the same dtype, contiguous.

    Raises:
        ValueError: an odd width, or strides that do not fit.
    """
    need_gates(gate_up)
    out: torch.Tensor = implementation("silu_mul", gate_up.device.type)(gate_up)
    return out

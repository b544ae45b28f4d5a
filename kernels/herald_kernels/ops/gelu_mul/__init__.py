"""The gate of a GeGLU MLP."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_gates


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` from the joined projection, with the tanh form of GELU.

    The gate is rounded before it multiplies, as in torch. Source: Shazeer 2020, arXiv 2002.05202; Hendrycks
    and Gimpel 2016, arXiv 1606.08415, section 2.

    Args:
        gate_up: [T, 2 * D], gate then up, unit stride in the last dimension.

    Returns:
        [T, D] of the same dtype, contiguous.

    Raises:
        ValueError: an odd width, or strides that do not fit.
    """
    need_gates(gate_up)
    out: torch.Tensor = implementation("gelu_mul", gate_up.device.type)(gate_up)
    return out

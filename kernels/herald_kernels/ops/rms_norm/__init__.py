"""RMS norm of hidden states."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``hidden / sqrt(mean(hidden^2) + eps) * weight`` over the last dimension, in float32, rounded once.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.

    Args:
        hidden: [T, D], unit stride in the last dimension.
        weight: [D] of the same dtype, or None for a norm without weights.
        eps: added to the mean square.

    Returns:
        [T, D] of the same dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    if weight is not None and (weight.shape != hidden.shape[1:] or weight.dtype != hidden.dtype):
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not match hidden {tuple(hidden.shape)} "
            f"{hidden.dtype}"
        )
    need_unit_stride(hidden=hidden)
    if weight is not None:
        need_unit_stride(weight=weight)
    out: torch.Tensor = implementation("rms_norm", hidden.device.type)(hidden, weight, eps)
    return out

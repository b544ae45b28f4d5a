"""Checks that several operations share."""

from __future__ import annotations

import torch


def need_unit_stride(**tensors: torch.Tensor) -> None:
    """Raise `ValueError` naming the first tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1")

"""Checks that several operations share."""

from __future__ import annotations

import torch


def need_unit_stride(**tensors: torch.Tensor) -> None:
    """Raise `ValueError` naming the first tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1")


def need_gates(gate_up: torch.Tensor) -> None:
    """Raise `ValueError` unless a row of [T, 2 * D] has a gate for every value, side by side in memory."""
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must have a gate for every value: an even width")
    need_unit_stride(gate_up=gate_up)

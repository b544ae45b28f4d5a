"""Triton kernel of `gelu_mul`."""

from __future__ import annotations

import torch

from herald_kernels.ops.gates import gate_mul


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `herald_kernels.gelu_mul`."""
    return gate_mul(gate_up, gelu=True)

"""Torch reference of `gelu_mul`."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `herald_kernels.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up

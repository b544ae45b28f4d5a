"""Torch reference of `silu_mul`."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `herald_kernels.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up

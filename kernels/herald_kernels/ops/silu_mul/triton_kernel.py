"""Triton kernel of `silu_mul`."""

from __future__ import annotations

import torch

from herald_kernels.ops.gates import gate_mul


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `herald_kernels.silu_mul`."""
    return gate_mul(gate_up, gelu=False)

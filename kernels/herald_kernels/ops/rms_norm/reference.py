"""Torch reference of `rms_norm`."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `herald_kernels.rms_norm`."""
    return F.rms_norm(hidden, weight.shape, weight, eps)

"""Torch reference of `rms_norm`."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `herald_kernels.rms_norm`."""
    return F.rms_norm(hidden, hidden.shape[1:], weight, eps)

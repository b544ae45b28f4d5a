"""Torch reference of `copy_rows`."""

from __future__ import annotations

import torch


def copy_rows(dst: torch.Tensor, dst_rows: torch.Tensor, src: torch.Tensor, src_rows: torch.Tensor) -> None:
    """See `herald_kernels.copy_rows`."""
    dst.index_copy_(0, dst_rows, src.index_select(0, src_rows))

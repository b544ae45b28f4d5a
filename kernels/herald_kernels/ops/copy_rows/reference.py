"""Torch reference of `copy_rows`."""

from __future__ import annotations

import torch


def copy_rows(
    dst: torch.Tensor, dst_rows: torch.Tensor, src: torch.Tensor, src_rows: torch.Tensor | None
) -> None:
    """See `herald_kernels.copy_rows`."""
    wanted = (dst_rows >= 0).nonzero().squeeze(1)
    source = wanted if src_rows is None else src_rows[wanted]
    dst.index_copy_(0, dst_rows[wanted], src.index_select(0, source))

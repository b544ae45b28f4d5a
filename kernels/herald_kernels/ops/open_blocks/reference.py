"""Torch reference of `open_blocks`."""

from __future__ import annotations

import torch


def open_blocks(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    closed: torch.Tensor,
    slots: torch.Tensor,
    opening: torch.Tensor,
    mask_id: int,
) -> None:
    """See `herald_kernels.open_blocks`."""
    counts = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
    opened = counts.index_add_(0, slots, opening.long())[:, None] > 0
    closed.copy_(torch.where(opened, tokens, closed))
    tokens.masked_fill_(opened, mask_id)
    draft.masked_fill_(opened, mask_id)
    masked.logical_or_(opened)

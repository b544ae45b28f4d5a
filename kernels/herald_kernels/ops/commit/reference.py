"""Torch reference of `commit`."""

from __future__ import annotations

import torch


def commit(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
) -> torch.Tensor:
    """See `herald_kernels.commit`."""
    left = masked.sum(1)
    bad = (masked & confidence.isnan()).any(1)
    wanted = torch.minimum(quota.to(left.dtype), left)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    mine, other = confidence[:, :, None], confidence[:, None, :]
    ahead = (other > mine) | ((other == mine) & (position[None, :] < position[:, None]))
    rank = (ahead & masked[:, None, :]).sum(2)
    over = masked & (confidence > threshold[:, None])
    enough = over.sum(1) >= wanted
    chosen = torch.where(enough[:, None], over, masked & (rank < wanted[:, None])) & ~bad[:, None]
    tokens.copy_(torch.where(chosen, candidate, tokens))
    masked.logical_and_(~chosen)
    return torch.where(bad, -1, left - chosen.sum(1)).to(torch.int32)

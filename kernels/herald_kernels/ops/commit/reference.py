"""Torch reference of `commit`."""

from __future__ import annotations

import torch


def commit(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    slots: torch.Tensor,
    best: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
    window: torch.Tensor | None,
) -> torch.Tensor:
    """See `herald_kernels.commit`."""
    still_open = masked[slots]
    bad = (still_open & confidence.isnan()).any(1)
    asked = still_open
    if window is not None:
        own = window[slots]
        turn = own.masked_fill(~still_open, torch.iinfo(own.dtype).max).amin(1, keepdim=True)
        asked = still_open & (own == turn)
    left = asked.sum(1)
    wanted = torch.minimum(quota.to(left.dtype), left)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    mine, other = confidence[:, :, None], confidence[:, None, :]
    ahead = (other > mine) | ((other == mine) & (position[None, :] < position[:, None]))
    rank = (ahead & asked[:, None, :]).sum(2)
    over = asked & (confidence > threshold[slots][:, None])
    enough = over.sum(1) >= wanted
    chosen = torch.where(enough[:, None], over, asked & (rank < wanted[:, None])) & ~bad[:, None]
    after = torch.where(chosen, candidate, tokens[slots])
    still_open = still_open & ~chosen
    # Rows that name one slot write the same to it.
    tokens[slots] = after
    masked[slots] = still_open
    draft[slots] = torch.where(still_open, best, after)
    status = torch.where(bad, -1, still_open.sum(1))
    return torch.cat([status[:, None], torch.where(still_open, -1 - best, after)], dim=1)

"""Torch reference of `commit_edits`."""

from __future__ import annotations

import torch


def commit_edits(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    edits: torch.Tensor,
    edit_threshold: torch.Tensor,
    slots: torch.Tensor,
    opening: torch.Tensor,
    best: torch.Tensor,
    candidate: torch.Tensor,
    confidence: torch.Tensor,
    quota: torch.Tensor,
    threshold: torch.Tensor,
    mask_id: int,
) -> torch.Tensor:
    """See `herald_kernels.commit_edits`."""
    before, open_before = tokens[slots], masked[slots]
    head, done, most = edits[slots].unbind(1)
    head = torch.where(opening > 0, 0, head)
    may_edit = edit_threshold[slots] < float("inf")
    position = torch.arange(tokens.shape[1], device=tokens.device)
    editable = may_edit[:, None] & ~open_before & (position >= head[:, None])
    left = open_before.sum(1)
    bad = ((open_before | editable) & confidence.isnan()).any(1)

    wanted = torch.minimum(quota.to(left.dtype), left)
    mine, other = confidence[:, :, None], confidence[:, None, :]
    ahead = (other > mine) | ((other == mine) & (position[None, :] < position[:, None]))
    rank = (ahead & open_before[:, None, :]).sum(2)
    over = open_before & (confidence > threshold[slots][:, None])
    enough = over.sum(1) >= wanted
    chosen = torch.where(enough[:, None], over, open_before & (rank < wanted[:, None])) & ~bad[:, None]
    changed = editable & (candidate != before) & (candidate != mask_id) & ~bad[:, None]
    changed &= confidence > edit_threshold[slots][:, None]

    after = torch.where(chosen | changed, candidate, before)
    still_open = open_before & ~chosen
    done = torch.where(left > 0, 0, done + 1)
    goes_on = may_edit & (done < most) & ((left > 0) | changed.any(1))
    tokens[slots] = after
    masked[slots] = still_open
    draft[slots] = torch.where(still_open, best, after)
    kept = edits[slots]
    kept[:, 0], kept[:, 1] = head, done
    edits[slots] = torch.where(may_edit[:, None], kept, edits[slots])
    left = still_open.sum(1)
    status = torch.where(bad, -1, torch.where(left > 0, left, goes_on.to(left.dtype)))
    return torch.cat([status[:, None], torch.where(still_open, -1 - best, after)], dim=1)

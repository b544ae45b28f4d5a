"""Torch reference of `route_experts`."""

from __future__ import annotations

import torch
from torch.nn import functional as F

# Stands for NaN where experts are ranked: worse than any score, better than what a group limit excludes.
LOWEST = -1e38
# Keeps the sum of sigmoids that are all zero from dividing by zero, as in the published code.
TINY = 1e-20


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of the last dimension, the lowest index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route_experts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.route_experts`."""
    logits = F.linear(hidden.float(), weight.float())
    scores = logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()
    choice = (scores if bias is None else scores + bias).nan_to_num(nan=LOWEST)
    if num_groups > 1:
        groups = choice.unflatten(1, (num_groups, -1))
        worth = groups.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best(worth, top_groups), True)
        choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = best(choice, top_k)
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    weights = weights * scale
    return ids.to(torch.int32), weights if expert_scale is None else weights * expert_scale[ids]

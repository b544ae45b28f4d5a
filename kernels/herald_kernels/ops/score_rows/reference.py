"""Torch reference of `score_rows`."""

from __future__ import annotations

import torch

# Scores of single queries that are alive at once.
CHUNK_VALUES = 1 << 22


def score_rows(
    q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, operator: str
) -> torch.Tensor:
    """See `herald_kernels.score_rows`."""
    num_kv_heads, num_rows, _ = rows.shape
    group = q.shape[1] // num_kv_heads
    # [H, D, M * G] and [H, 1, M * G].
    query = (q.float() * scale).unflatten(1, (num_kv_heads, group)).permute(1, 3, 0, 2).flatten(2)
    offset = lse.unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1)[:, None]
    out = torch.empty(num_kv_heads, num_rows, dtype=torch.float32, device=q.device)
    step = max(1, CHUNK_VALUES // (num_kv_heads * query.shape[2]))
    for first in range(0, num_rows, step):
        keys = rows[:, first : first + step, : q.shape[2]].float()
        scores = torch.bmm(keys, query).sub_(offset)
        out[:, first : first + step] = scores.amax(-1) if operator == "max" else scores.logsumexp(-1)
    return out

"""Torch reference of `resident_attention`: lane by lane, so that no lane's bits depend on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Rows of a set whose scores are alive at once; a constant, so that the split depends on the lane alone.
CHUNK_ROWS = 8192


@dataclass
class _Softmax:
    """A softmax-weighted sum under way: [H, R, 1], [H, R, 1] and [H, R, D], float32."""

    peak: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor


def _fold(state: _Softmax | None, query: torch.Tensor, rows: torch.Tensor) -> _Softmax:
    """Add ``rows`` [H, n, 2D] (read in place when float32) to the softmax of ``query`` [H, R, D]."""
    keys, values = rows.float().split(query.shape[-1], dim=-1)
    scores = torch.bmm(query, keys.transpose(1, 2))
    peak = scores.amax(-1, keepdim=True)
    if state is not None:
        peak = torch.maximum(peak, state.peak)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if state is None:
        return _Softmax(peak, total, torch.bmm(weights, values))
    shrink = torch.exp(state.peak - peak)
    return _Softmax(peak, total + state.total * shrink, torch.baddbmm(state.acc * shrink, weights, values))


def _attend(query: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the lane's own and parent rows (``near``), then over its resident set (``far``)."""
    state = _fold(None, query, near)
    for first in range(0, far.shape[1], CHUNK_ROWS):
        state = _fold(state, query, far[:, first : first + CHUNK_ROWS])
    return state.acc / state.total, (state.peak + state.total.log()).squeeze(-1)


def resident_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    arena: torch.Tensor,
    row_start: torch.Tensor,
    length: torch.Tensor,
    parent: torch.Tensor,
    scale: float,
    max_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.resident_attention`."""
    _, block_length, num_heads, _ = q.shape
    num_kv_heads = arena.shape[0]
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    lanes = zip(row_start.tolist(), length.tolist(), parent.tolist(), strict=True)
    for lane, (start, counts, parent_lane) in enumerate(lanes):
        # [H, B * G, D]: one matrix of queries for each KV head.
        query = q[lane].unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2).float() * scale
        near = rows[lane] if parent_lane < 0 else torch.cat([rows[lane], rows[parent_lane]], dim=1)
        out_heads = out[lane].unflatten(1, (num_kv_heads, group)).transpose(0, 1)
        lse_heads = lse[lane].unflatten(1, (num_kv_heads, group)).transpose(0, 1)
        # Heads share one call when their sets are equally long, which is what the engine makes.
        step = num_kv_heads if len(set(counts)) == 1 else 1
        for head in range(0, num_kv_heads, step):
            heads = slice(head, head + step)
            far = arena[heads, start : start + counts[head]]
            values, sums = _attend(query[heads], near[heads], far)
            out_heads[heads] = values.unflatten(1, (block_length, group))
            lse_heads[heads] = sums.unflatten(1, (block_length, group))
    return out, lse

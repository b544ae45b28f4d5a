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


def _fold(
    state: _Softmax | None, query: torch.Tensor, rows: torch.Tensor, visible: torch.Tensor | None
) -> _Softmax:
    """Add ``rows`` [H, n, 2D] (read in place when float32) to the softmax of ``query`` [H, R, D].

    ``visible`` bool [R, n], None for all; at first every query sees a row.
    """
    keys, values = rows.float().split(query.shape[-1], dim=-1)
    scores = torch.bmm(query, keys.transpose(1, 2))
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if state is not None:
        peak = torch.maximum(peak, state.peak)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if state is None:
        return _Softmax(peak, total, torch.bmm(weights, values))
    shrink = torch.exp(state.peak - peak)
    return _Softmax(peak, total + state.total * shrink, torch.baddbmm(state.acc * shrink, weights, values))


def _attend(
    query: torch.Tensor,
    near: torch.Tensor,
    far: torch.Tensor,
    near_visible: torch.Tensor | None,
    far_visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the lane's own and parent rows (``near``), then over its resident set (``far``)."""
    state = _fold(None, query, near, near_visible)
    for first in range(0, far.shape[1], CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        state = _fold(state, query, far[:, chunk], None if far_visible is None else far_visible[:, chunk])
    return state.acc / state.total, (state.peak + state.total.log()).squeeze(-1)


@dataclass(frozen=True)
class _Sight:
    """What the positions of one lane see, where it is not everything.

    Attributes:
        start, parent_start: first positions of the lane and of its parent (the lane's own without one).
        window: see `herald_kernels.resident_attention`.
    """

    block_length: int
    causal: bool
    start: int
    parent_start: int
    window: int

    def near(self, has_parent: bool) -> torch.Tensor:
        """bool [B, B], or [B, 2 B] with the parent's rows behind the lane's own."""
        offset = torch.arange(self.block_length)
        own = torch.ones(self.block_length, self.block_length, dtype=torch.bool)
        if self.causal:
            own = offset <= offset[:, None]
            if self.window:
                own &= offset >= offset[:, None] - self.window
        if not has_parent:
            return own
        return torch.cat([own, self._reaches(self.parent_start + offset)], dim=1)

    def far(self, length: int) -> torch.Tensor | None:
        """bool [B, length], None for everything."""
        if not self.window:
            return None
        last = self.parent_start - 1
        return self._reaches(last - (last - torch.arange(length)) % self.window)

    def _reaches(self, positions: torch.Tensor) -> torch.Tensor:
        """bool [B, n]: which of the earlier ``positions`` [n] are in each query's window."""
        if not self.window:
            return torch.ones(self.block_length, len(positions), dtype=torch.bool)
        first = torch.full((self.block_length,), self.start - self.window)
        if self.causal:
            first = first + torch.arange(self.block_length)
        return positions >= first[:, None]


def _rows_of(visible: torch.Tensor | None, group: int, device: torch.device) -> torch.Tensor | None:
    """[B, n] -> [B * G, n]."""
    return None if visible is None else visible.to(device).repeat_interleave(group, 0)


def resident_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    arena: torch.Tensor,
    row_start: torch.Tensor,
    length: torch.Tensor,
    parent: torch.Tensor,
    scale: float,
    max_length: int,
    causal: torch.Tensor | None = None,
    window: int = 0,
    position: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.resident_attention`."""
    _, block_length, num_heads, _ = q.shape
    num_kv_heads = arena.shape[0]
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    flags = [0] * len(q) if causal is None else causal.tolist()
    starts = [0] * len(q) if position is None else position.tolist()
    lanes = zip(row_start.tolist(), length.tolist(), parent.tolist(), strict=True)
    for lane, (start, counts, parent_lane) in enumerate(lanes):
        # [H, B * G, D]: one matrix of queries for each KV head.
        query = q[lane].unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2).float() * scale
        near = rows[lane] if parent_lane < 0 else torch.cat([rows[lane], rows[parent_lane]], dim=1)
        near_visible = far_visible = None
        if flags[lane] or window:
            origin = starts[lane if parent_lane < 0 else parent_lane]
            sight = _Sight(block_length, bool(flags[lane]), starts[lane], origin, window)
            near_visible = _rows_of(sight.near(parent_lane >= 0), group, q.device)
            far_visible = _rows_of(sight.far(max(counts)), group, q.device)
        out_heads = out[lane].unflatten(1, (num_kv_heads, group)).transpose(0, 1)
        lse_heads = lse[lane].unflatten(1, (num_kv_heads, group)).transpose(0, 1)
        # Heads share one call when their sets are equally long, which is what the engine makes.
        step = num_kv_heads if len(set(counts)) == 1 else 1
        for head in range(0, num_kv_heads, step):
            heads = slice(head, head + step)
            far = arena[heads, start : start + counts[head]]
            seen = None if far_visible is None else far_visible[:, : counts[head]]
            values, sums = _attend(query[heads], near[heads], far, near_visible, seen)
            out_heads[heads] = values.unflatten(1, (block_length, group))
            lse_heads[heads] = sums.unflatten(1, (block_length, group))
    return out, lse

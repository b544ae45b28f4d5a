"""Attention of lanes over their request's resident set, themselves and their parent."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def resident_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    arena: torch.Tensor,
    row_start: torch.Tensor,
    length: torch.Tensor,
    parent: torch.Tensor,
    scale: float,
    max_length: int,
    *,
    causal: torch.Tensor | None = None,
    window: int = 0,
    position: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every position of a lane to the resident set, the whole lane and the whole parent lane.

    Query head h reads KV head ``h // (num_heads // num_kv_heads)``. Arena rows outside
    ``[row_start, row_start + length)`` are never used, whatever they hold.

    In a causal lane a position sees those of its lane up to itself. With a window a set is a ring: row r of
    it holds the last position before the lane (or before its parent, if it has one) that leaves the rest r
    when divided by ``window``. A causal lane's position p then sees positions ``>= p - window``; every
    position of another lane sees its whole lane and what a causal lane's first one would.

    A lane's bits depend on its own inputs and on the shape of the call, not on its place in the call nor on
    what the lanes beside it hold. The shape decides into how many pieces the sets are cut, all alike: the
    number of lanes, the heads, the device, and ``max_length`` rounded up to one of four steps between powers
    of two. Source: split KV of Flash-Decoding (Dao et al. 2023).

    Args:
        q: [N, B, num_heads, head_dim], unit stride in the last dimension.
        rows: [N, num_kv_heads, B, 2 * head_dim], the lanes' own K and V, unit stride in the last dimension.
        arena: [num_kv_heads, A, 2 * head_dim], one layer of the arena, unit stride in the last dimension.
        row_start: int64 [N]: first arena row of the lane's request.
        length: int32 [N, num_kv_heads]: rows of the resident set, 0 for none.
        parent: int32 [N]: a lane of this call, or -1.
        scale: of the scores before the softmax, positive.
        max_length: at least every length. Checked where that costs no synchronisation (cpu).
        causal: int32 [N], 1 for a causal lane; None for none.
        window: rows of a ring, 0 where sets are none.
        position: int64 [N], of the lane's first token; needed with a window.

    Returns:
        out, like q, and lse, float32 [N, B, num_heads]: natural logarithm of the sum of the exponentials of
        the scaled scores, over everything attended to.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or a length exceeds ``max_length`` (cpu).
    """
    num_lanes, block_length, num_heads, head_dim = q.shape
    num_kv_heads = arena.shape[0]
    if rows.shape != (num_lanes, num_kv_heads, block_length, 2 * head_dim) or num_heads % num_kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)} does not match rows {tuple(rows.shape)}, {num_kv_heads} KV heads"
        )
    if arena.shape[2] != 2 * head_dim or not q.dtype == rows.dtype == arena.dtype:
        raise ValueError(
            f"arena {tuple(arena.shape)} {arena.dtype} does not match rows {tuple(rows.shape)} {rows.dtype} "
            f"and q {q.dtype}"
        )
    if (
        length.shape != (num_lanes, num_kv_heads)
        or row_start.shape != (num_lanes,)
        or parent.shape != (num_lanes,)
    ):
        raise ValueError(
            f"length {tuple(length.shape)}, row_start {tuple(row_start.shape)}, parent {tuple(parent.shape)} "
            f"must describe {num_lanes} lanes of {num_kv_heads} KV heads"
        )
    if length.device.type == "cpu" and num_lanes and int(length.max()) > max_length:
        raise ValueError(
            f"max_length={max_length} is less than the longest resident set, {int(length.max())}"
        )
    if causal is not None and causal.shape != (num_lanes,):
        raise ValueError(f"causal {tuple(causal.shape)} must describe {num_lanes} lanes")
    if window < 0 or (window and (position is None or position.shape != (num_lanes,) or max_length > window)):
        raise ValueError(
            f"window={window} needs the first position of each of {num_lanes} lanes, and a max_length of at "
            f"most the window, not {max_length}"
        )
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive")
    need_unit_stride(q=q, rows=rows, arena=arena)
    out, lse = implementation("resident_attention", q.device.type)(
        q, rows, arena, row_start, length, parent, scale, max_length, causal, window, position
    )
    return out, lse

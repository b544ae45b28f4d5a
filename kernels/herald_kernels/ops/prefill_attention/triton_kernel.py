# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `prefill_attention`: flash attention, all query heads of a KV head in a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from herald_kernels.ops.online_softmax import fold, load_full_tile, load_tile
from herald_kernels.ops.tiles import prefill_tiles, row_descriptor


@triton.jit(do_not_specialize=["num_queries", "num_rows", "q_start", "block_length", "window"])
def _prefill_kernel(
    q,
    rows,
    row_matrix,
    out,
    num_queries,
    num_rows,
    q_start,
    block_length,
    window,
    scale_log2,
    q_stride_position,
    q_stride_head,
    rows_stride_head,
    rows_stride_row,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # Late tiles see most rows and start first, so that the last wave is made of short ones.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0).to(tl.int64)
    m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    # Query row m is head m % G of token m // G; rows beyond the last token repeat it and are not stored.
    token = tl.minimum(m // G, num_queries - 1)
    real = m < num_queries * G
    q_rows = q + token * q_stride_position + (head * G + m % G) * q_stride_head
    query = tl.load(q_rows[:, None] + col[None, :], mask=real[:, None], other=0.0)
    end = tl.minimum(((q_start + token) // block_length + 1) * block_length, num_rows)
    shared = tl.min(end, 0).to(tl.int32) // BLOCK_N * BLOCK_N
    last = tl.max(end, 0).to(tl.int32)
    whole = 0
    if WINDOW:
        begin = tl.maximum(q_start + token - window, 0)
        # Tiles from here on reach back no further than every query of this program sees.
        whole = tl.cdiv(tl.max(begin, 0).to(tl.int32), BLOCK_N) * BLOCK_N
        shared = tl.maximum(shared, whole)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    head_rows = rows + head * rows_stride_head
    first_row = (head * (rows_stride_head // rows_stride_row)).to(tl.int32)
    # Whole tiles that every query of this program sees need no mask.
    if WINDOW:
        low = tl.min(begin, 0).to(tl.int32) // BLOCK_N * BLOCK_N
        for start in tl.range(low, tl.minimum(whole, last), BLOCK_N, num_stages=1):
            n = start + tl.arange(0, BLOCK_N)
            keys, values = load_tile(head_rows + n.to(tl.int64) * rows_stride_row, n < last, D)
            visible = (n[None, :] < end[:, None]) & (n[None, :] >= begin[:, None])
            peak, total, acc = fold(query, keys, values, visible, peak, total, acc, scale_log2, True, True)
    for start in range(whole, shared, BLOCK_N):
        keys, values = load_full_tile(
            head_rows + rows_stride_row.to(tl.int64) * start,
            row_matrix,
            first_row + start,
            rows_stride_row,
            D,
            BLOCK_N,
            DESCRIPTORS,
        )
        peak, total, acc = fold(query, keys, values, True, peak, total, acc, scale_log2, False)
    for start in tl.range(shared, last, BLOCK_N, num_stages=1):
        n = start + tl.arange(0, BLOCK_N)
        keys, values = load_tile(head_rows + n.to(tl.int64) * rows_stride_row, n < last, D)
        visible = n[None, :] < end[:, None]
        peak, total, acc = fold(query, keys, values, visible, peak, total, acc, scale_log2, True, WINDOW)

    target = out + (token * (H * G) + head * G + m % G) * D
    value = acc / total[:, None]
    tl.store(target[:, None] + col[None, :], value.to(out.dtype.element_ty), mask=real[:, None])


def prefill_attention(
    q: torch.Tensor, rows: torch.Tensor, q_start: int, block_length: int, scale: float, window: int = 0
) -> torch.Tensor:
    """See `herald_kernels.prefill_attention`. ``head_dim`` must be a power of two, at least 16."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_rows, _ = rows.shape
    group = num_heads // num_kv_heads
    tile = prefill_tiles(head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_queries:
        descriptor = row_descriptor(rows, tile)
        _prefill_kernel[(num_kv_heads, triton.cdiv(num_queries * group, tile.queries))](
            q,
            rows,
            descriptor,
            out,
            num_queries,
            num_rows,
            q_start,
            min(block_length, num_rows),
            window,
            scale * 1.4426950408889634,
            *q.stride()[:2],
            *rows.stride()[:2],
            G=group,
            H=num_kv_heads,
            D=head_dim,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            DESCRIPTORS=descriptor is not None,
            WINDOW=window > 0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out

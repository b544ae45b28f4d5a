# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `prefill_attention`: flash attention, all query heads of a KV head in a tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from herald_kernels.ops.online_softmax import fold


@dataclass(frozen=True)
class Tiles:
    """Shape of the work of one program: query rows, key rows, warps and pipeline stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles by head size: 16-bit ones keep two or three stages within a Hopper SM's shared memory."""
    if dtype == torch.float32:
        return Tiles(32, 32, 8, 1)
    if head_dim > 128:
        return Tiles(64, 64, 4, 2)
    return Tiles(128, 64 if head_dim == 128 else 128, 8, 3)


@triton.jit(do_not_specialize=["num_queries", "num_rows", "q_start", "block_length"])
def _prefill_kernel(
    q,
    rows,
    out,
    num_queries,
    num_rows,
    q_start,
    block_length,
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

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    head_rows = rows + head * rows_stride_head
    # Whole tiles that every query of this program sees need no mask.
    for start in range(0, shared, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        everything = n >= 0
        tile_rows = head_rows + n.to(tl.int64) * rows_stride_row
        peak, total, acc = fold(
            query, tile_rows, everything, everything, peak, total, acc, scale_log2, D, False
        )
    for start in range(shared, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        tile_rows = head_rows + n.to(tl.int64) * rows_stride_row
        visible = n[None, :] < end[:, None]
        peak, total, acc = fold(query, tile_rows, n < last, visible, peak, total, acc, scale_log2, D, True)

    target = out + (token * (H * G) + head * G + m % G) * D
    value = acc / total[:, None]
    tl.store(target[:, None] + col[None, :], value.to(out.dtype.element_ty), mask=real[:, None])


def prefill_attention(
    q: torch.Tensor, rows: torch.Tensor, q_start: int, block_length: int, scale: float
) -> torch.Tensor:
    """See `herald_kernels.prefill_attention`. ``head_dim`` must be a power of two, at least 16."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_rows, _ = rows.shape
    group = num_heads // num_kv_heads
    tile = tiles(head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_queries:
        _prefill_kernel[(num_kv_heads, triton.cdiv(num_queries * group, tile.queries))](
            q,
            rows,
            out,
            num_queries,
            num_rows,
            q_start,
            min(block_length, num_rows),
            scale * 1.4426950408889634,
            *q.stride()[:2],
            *rows.stride()[:2],
            G=group,
            H=num_kv_heads,
            D=head_dim,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out

# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `resident_attention`: flash-decoding over splits of the resident set, then a combination.

How a set is split depends on the model's shape and on ``max_length`` rounded up to a power of two, so that a
lane is computed in the same order whatever lanes are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from herald_kernels.ops.online_softmax import fold

# One lane should give about every SM of a large GPU a program; more lanes fill it by themselves.
PROGRAMS_PER_LANE = 128
MIN_SPLIT_ROWS = 256
# Lanes of one launch are limited so that the partial results take no more than this.
WORKSPACE_BYTES = 256 << 20
COMBINE_ROWS = 8


@dataclass(frozen=True)
class Tiles:
    """Shape of the work of one program: query rows, set rows, warps and pipeline stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles(num_queries: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles for ``num_queries`` (B x G) query rows of a lane in one KV head."""
    queries = max(16, triton.next_power_of_2(num_queries))
    if dtype == torch.float32:
        # Exact float32 products run on the FMA units, from registers.
        return Tiles(min(32, queries), 32, 8, 1)
    queries = min(128 if head_dim <= 128 else 64, queries)
    return Tiles(queries, 64, 8 if queries == 128 else 4, 3 if head_dim <= 128 else 2)


def split_rows(max_length: int, num_kv_heads: int, num_tiles: int) -> int:
    """Rows of the set that one program takes."""
    splits = triton.next_power_of_2(max(1, PROGRAMS_PER_LANE // (num_kv_heads * num_tiles)))
    return max(MIN_SPLIT_ROWS, triton.next_power_of_2(max(1, max_length)) // splits)


@triton.jit(do_not_specialize=["first_lane", "num_splits", "split_rows"])
def _attend_kernel(
    q,
    rows,
    arena,
    row_start,
    length,
    parent,
    out,
    lse,
    part_out,
    part_lse,
    scale_log2,
    first_lane,
    num_splits,
    split_rows,
    q_stride_lane,
    q_stride_position,
    q_stride_head,
    rows_stride_lane,
    rows_stride_head,
    rows_stride_row,
    arena_stride_head,
    arena_stride_row,
    B: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NEAR: tl.constexpr,
    DIRECT: tl.constexpr,
):
    NUM_TILES: tl.constexpr = (B * G + BLOCK_M - 1) // BLOCK_M
    # Lanes are the fastest axis: those of one request run together and share its set in the L2 cache.
    local_lane = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    lane = local_lane + first_lane
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    count = tl.load(length + lane * H + head)
    first = split * split_rows
    if (split > 0) & (first >= count):
        return

    m = (tl.program_id(0) % NUM_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    real = m < B * G
    q_rows = q + lane * q_stride_lane + (m // G) * q_stride_position + (head * G + m % G) * q_stride_head
    query = tl.load(q_rows[:, None] + col[None, :], mask=real[:, None], other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    # The first split also takes the lane's own rows and its parent's.
    parent_lane = tl.load(parent + lane).to(tl.int64)
    sources = tl.where(split == 0, tl.where(parent_lane >= 0, 2, 1), 0)
    near = tl.arange(0, BLOCK_NEAR)
    for source in tl.range(0, sources, num_stages=1):
        source_lane = tl.where(source == 0, lane, parent_lane)
        near_rows = rows + source_lane * rows_stride_lane + head * rows_stride_head + near * rows_stride_row
        inside = near < B
        peak, total, acc = fold(
            query, near_rows, inside, inside[None, :], peak, total, acc, scale_log2, D, True
        )

    set_rows = arena + head * arena_stride_head + tl.load(row_start + lane).to(tl.int64) * arena_stride_row
    last = tl.minimum(first + split_rows, count)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < last
        tile_rows = set_rows + n.to(tl.int64) * arena_stride_row
        peak, total, acc = fold(
            query, tile_rows, inside, inside[None, :], peak, total, acc, scale_log2, D, True
        )

    value = acc / total[:, None]
    sum_log2 = peak + tl.log2(total)
    if DIRECT:
        target = (lane * B + m // G) * (H * G) + head * G + m % G
        tl.store(out + target[:, None] * D + col[None, :], value.to(out.dtype.element_ty), mask=real[:, None])
        tl.store(lse + target, sum_log2 * 0.6931471805599453, mask=real)
    else:
        target = ((local_lane * H + head) * num_splits + split) * (B * G) + m
        tl.store(part_out + target[:, None] * D + col[None, :], value, mask=real[:, None])
        tl.store(part_lse + target, sum_log2, mask=real)


@triton.jit(do_not_specialize=["first_lane", "num_splits", "split_rows"])
def _combine_kernel(
    part_out,
    part_lse,
    length,
    out,
    lse,
    first_lane,
    num_splits,
    split_rows,
    B: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    local_lane = tl.program_id(2).to(tl.int64)
    lane = local_lane + first_lane
    col = tl.arange(0, D)
    real = m < B * G
    used = tl.maximum(tl.cdiv(tl.load(length + lane * H + head), split_rows), 1)
    source = (local_lane * H + head) * num_splits * (B * G) + m
    peak = tl.load(part_lse + source, mask=real, other=0.0)
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.load(part_out + source[:, None] * D + col[None, :], mask=real[:, None], other=0.0)
    for split in range(1, used):
        part = source + split * (B * G)
        part_peak = tl.load(part_lse + part, mask=real, other=0.0)
        value = tl.load(part_out + part[:, None] * D + col[None, :], mask=real[:, None], other=0.0)
        higher = tl.maximum(peak, part_peak)
        shrink, weight = tl.exp2(peak - higher), tl.exp2(part_peak - higher)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + value * weight[:, None]
        peak = higher
    target = (lane * B + m // G) * (H * G) + head * G + m % G
    value = acc / total[:, None]
    tl.store(out + target[:, None] * D + col[None, :], value.to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + target, (peak + tl.log2(total)) * 0.6931471805599453, mask=real)


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
    """See `herald_kernels.resident_attention`. ``head_dim`` must be a power of two, at least 16."""
    num_lanes, block_length, num_heads, head_dim = q.shape
    num_kv_heads = arena.shape[0]
    group = num_heads // num_kv_heads
    num_queries = block_length * group
    tile = tiles(num_queries, head_dim, q.dtype)
    num_tiles = triton.cdiv(num_queries, tile.queries)
    rows_per_split = split_rows(max_length, num_kv_heads, num_tiles)
    num_splits = max(1, triton.cdiv(max_length, rows_per_split))

    row_start, length, parent = row_start.contiguous(), length.contiguous(), parent.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    direct = num_splits == 1
    lane_bytes = num_kv_heads * num_splits * num_queries * (head_dim + 1) * 4
    step = num_lanes if direct else min(num_lanes, max(1, WORKSPACE_BYTES // lane_bytes))
    part_out, part_lse = out, lse
    if not direct:
        part_shape = (step, num_kv_heads, num_splits, num_queries)
        part_out = torch.empty((*part_shape, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(part_shape, dtype=torch.float32, device=q.device)
    shape = {"B": block_length, "G": group, "H": num_kv_heads, "D": head_dim}
    for first in range(0, num_lanes, max(1, step)):
        lanes = min(step, num_lanes - first)
        _attend_kernel[(lanes * num_tiles, num_kv_heads, num_splits)](
            q,
            rows,
            arena,
            row_start,
            length,
            parent,
            out,
            lse,
            part_out,
            part_lse,
            scale * 1.4426950408889634,
            first,
            num_splits,
            rows_per_split,
            *q.stride()[:3],
            *rows.stride()[:3],
            *arena.stride()[:2],
            **shape,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            BLOCK_NEAR=max(16, triton.next_power_of_2(block_length)),
            DIRECT=direct,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if not direct:
            _combine_kernel[(triton.cdiv(num_queries, COMBINE_ROWS), num_kv_heads, lanes)](
                part_out,
                part_lse,
                length,
                out,
                lse,
                first,
                num_splits,
                rows_per_split,
                **shape,
                BLOCK_M=COMBINE_ROWS,
                num_warps=4,
            )
    return out, lse

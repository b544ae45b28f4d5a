# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `resident_attention`: flash-decoding over sets, whole or cut, then a combination."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from herald_kernels.ops.online_softmax import fold, load_full_tile, load_tile
from herald_kernels.ops.resident_attention.splits import Device, plan, round_length
from herald_kernels.ops.tiles import aligned_rows, programs_per_multiprocessor, resident_tiles, row_descriptor

# Partial rows that a program of the combination holds.
COMBINED = 32
# Where no device tells (the interpreter).
DEFAULT_MULTIPROCESSORS = 132


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["tiles_per_piece", "max_pieces", "window"])
def _attend_kernel(
    q,
    rows,
    arena,
    arena_rows,
    row_start,
    length,
    parent,
    causal,
    position,
    out,
    lse,
    part_out,
    part_lse,
    scale_log2,
    window,
    tiles_per_piece,
    max_pieces,
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
    EDGE_STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    NUM_TILES: tl.constexpr = (B * G + BLOCK_M - 1) // BLOCK_M
    # Lanes are the fastest axis: those of one request run together and share its set in the L2 cache.
    lane = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    m = (tl.program_id(0) % NUM_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, D)
    real = m < B * G
    q_rows = q + lane * q_stride_lane + (m // G) * q_stride_position + (head * G + m % G) * q_stride_head

    # All that the addresses of the set depend on is in flight at once.
    count = tl.load(length + lane * H + head)
    start = tl.load(row_start + lane).to(tl.int64)
    parent_lane = tl.load(parent + lane).to(tl.int64)
    query = tl.load(q_rows[:, None] + col[None, :], mask=real[:, None], other=0.0)

    # What a query sees is bounded by its own position: `ahead` of its lane, `first` of what is before it.
    bounded = tl.load(causal + lane) if CAUSAL else tl.full([], 0, tl.int32)
    offset = tl.where(bounded > 0, m // G, 0)
    ahead = tl.where(bounded > 0, m // G, B)
    if WINDOW:
        origin = tl.load(position + tl.where(parent_lane >= 0, parent_lane, lane))
        first_seen = tl.load(position + lane) + offset - window
        behind = tl.where(bounded > 0, m // G - window, -1)

    # The lane's own rows and its parent's follow those of the set.
    last = count + tl.where(parent_lane >= 0, 2 * B, B)
    num_tiles = tl.cdiv(last, BLOCK_N)
    pieces = tl.cdiv(num_tiles, tiles_per_piece)
    if piece >= pieces:
        return
    begin = piece * num_tiles // pieces
    end = (piece + 1) * num_tiles // pieces

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    set_rows = arena + head * arena_stride_head + start * arena_stride_row
    first_row = (head * (arena_stride_head // arena_stride_row) + start).to(tl.int32)
    full = 0 if WINDOW else count // BLOCK_N
    for tile in range(begin, tl.minimum(end, full)):
        keys, values = load_full_tile(
            set_rows + arena_stride_row.to(tl.int64) * (tile * BLOCK_N),
            arena_rows,
            first_row + tile * BLOCK_N,
            arena_stride_row,
            D,
            BLOCK_N,
            DESCRIPTORS,
        )
        peak, total, acc = fold(query, keys, values, True, peak, total, acc, scale_log2, False)

    last = tl.minimum(last, end * BLOCK_N)
    for first in tl.range(tl.maximum(begin, full) * BLOCK_N, last, BLOCK_N, num_stages=EDGE_STAGES):
        n = first + tl.arange(0, BLOCK_N)
        near = n - count
        near_lane = tl.where(near < B, lane, parent_lane)
        near_rows = (
            rows + near_lane * rows_stride_lane + head * rows_stride_head + (near % B) * rows_stride_row
        )
        either = tl.where(near < 0, set_rows + n.to(tl.int64) * arena_stride_row, near_rows)
        if ALIGNED:
            either = tl.multiple_of(either, 16)
        inside = n < last
        keys, values = load_tile(either, inside, D)
        if CAUSAL or WINDOW:
            own = (near >= 0) & (near < B)
            visible = inside[None, :] & ((near[None, :] <= ahead[:, None]) | (~own)[None, :])
            if WINDOW:
                last_set = origin - 1
                ring = last_set - (last_set - n) % window  # of rows below `count`, where n <= last_set
                before = tl.where(near < 0, ring, origin + (near - B))
                reached = before[None, :] >= first_seen[:, None]
                reached = tl.where(own[None, :], near[None, :] >= behind[:, None], reached)
                visible &= reached
            peak, total, acc = fold(query, keys, values, visible, peak, total, acc, scale_log2, True, True)
        else:
            peak, total, acc = fold(query, keys, values, inside[None, :], peak, total, acc, scale_log2, True)

    if CAUSAL or WINDOW:
        # A piece of which a query sees nothing weighs nothing.
        acc = tl.where(total[:, None] > 0, acc, 0.0)
        peak = tl.where(total > 0, peak, float("-inf"))
        total = tl.where(total > 0, total, 1.0)
    value = acc / total[:, None]
    sum_log2 = peak + tl.log2(total)
    if pieces == 1:
        target = (lane * B + m // G) * (H * G) + head * G + m % G
        tl.store(out + target[:, None] * D + col[None, :], value.to(out.dtype.element_ty), mask=real[:, None])
        tl.store(lse + target, sum_log2 * 0.6931471805599453, mask=real)
    else:
        target = ((lane * H + head) * max_pieces + piece) * (B * G) + m
        tl.store(part_out + target[:, None] * D + col[None, :], value, mask=real[:, None])
        tl.store(part_lse + target, sum_log2, mask=real)


@triton.jit(do_not_specialize=["tiles_per_piece", "max_pieces"])
def _combine_kernel(
    part_out,
    part_lse,
    length,
    parent,
    out,
    lse,
    tiles_per_piece,
    max_pieces,
    B: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
):
    lane = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    piece = tl.arange(0, PIECES)
    col = tl.arange(0, D)
    row = tl.minimum(m, B * G - 1)
    source = ((lane * H + head) * max_pieces + piece[:, None]) * (B * G) + row[None, :]

    # All pieces there can be are read at once, also those that this set does not have.
    last = tl.load(length + lane * H + head) + tl.where(tl.load(parent + lane) >= 0, 2 * B, B)
    pieces = tl.cdiv(tl.cdiv(last, BLOCK_N), tiles_per_piece)
    allocated = piece < max_pieces
    part = tl.load(part_lse + source, mask=allocated[:, None], other=0.0)
    value = tl.load(
        part_out + source[:, :, None] * D + col[None, None, :], mask=allocated[:, None, None], other=0.0
    )
    written = piece < pieces
    part = tl.where(written[:, None], part, float("-inf"))
    peak = tl.max(part, 0)
    weight = tl.exp2(part - peak[None, :])
    total = tl.sum(weight, 0)
    mixed = tl.sum(tl.where(written[:, None, None], value * weight[:, :, None], 0.0), 0) / total[:, None]
    real = m < tl.where(pieces > 1, B * G, 0)
    target = (lane * B + m // G) * (H * G) + head * G + m % G
    tl.store(out + target[:, None] * D + col[None, :], mixed.to(out.dtype.element_ty), mask=real[:, None])
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
    causal: torch.Tensor | None = None,
    window: int = 0,
    position: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.resident_attention`. ``head_dim`` must be a power of two, at least 16."""
    num_lanes, block_length, num_heads, head_dim = q.shape
    num_kv_heads = arena.shape[0]
    group = num_heads // num_kv_heads
    num_queries = block_length * group
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not num_lanes:
        return out, lse
    longest = round_length(max_length)
    tile = resident_tiles(num_queries, head_dim, q.dtype, num_lanes * num_kv_heads * longest)
    lane_programs = triton.cdiv(num_queries, tile.queries)
    cut = plan(
        triton.cdiv(longest + 2 * block_length, tile.keys),
        tile.keys,
        num_lanes * num_kv_heads * lane_programs,
        num_lanes * num_kv_heads * num_queries,
        head_dim,
        Device(_multiprocessors(q.device), programs_per_multiprocessor(tile, head_dim, q.element_size())),
    )

    length, parent = length.contiguous(), parent.contiguous()
    flags = parent if causal is None else causal.contiguous()
    starts = parent if position is None else position.contiguous()
    part_out, part_lse = out, lse
    if cut.pieces > 1:
        part_shape = (num_lanes, num_kv_heads, cut.pieces, num_queries)
        part_out = torch.empty((*part_shape, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(part_shape, dtype=torch.float32, device=q.device)
    shape = {"B": block_length, "G": group, "H": num_kv_heads, "D": head_dim, "BLOCK_N": tile.keys}
    descriptor = row_descriptor(arena, tile)
    _attend_kernel[(num_lanes * lane_programs, num_kv_heads, cut.pieces)](
        q,
        rows,
        arena,
        descriptor,
        row_start.contiguous(),
        length,
        parent,
        flags,
        starts,
        out,
        lse,
        part_out,
        part_lse,
        scale * 1.4426950408889634,
        window,
        cut.tiles_per_piece,
        cut.pieces,
        *q.stride()[:3],
        *rows.stride()[:3],
        *arena.stride()[:2],
        **shape,
        BLOCK_M=tile.queries,
        EDGE_STAGES=min(2, tile.num_stages),
        DESCRIPTORS=descriptor is not None,
        ALIGNED=aligned_rows(arena) and aligned_rows(rows),
        CAUSAL=causal is not None,
        WINDOW=window > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if cut.pieces > 1:
        pieces = triton.next_power_of_2(cut.pieces)
        block = max(1, COMBINED // pieces)
        _combine_kernel[(triton.cdiv(num_queries, block), num_kv_heads, num_lanes)](
            part_out,
            part_lse,
            length,
            parent,
            out,
            lse,
            cut.tiles_per_piece,
            cut.pieces,
            **shape,
            BLOCK_M=block,
            PIECES=pieces,
            num_warps=4,
        )
    return out, lse

# mypy: disable-error-code="no-untyped-def"
"""(token, expert) pairs in the order of experts, cut into tiles of one expert each, without the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Pairs of a program, each compared with each; of few pairs a program takes fewer.
CHUNK, SMALL_CHUNK, FEW_PAIRS = 256, 64, 2048
# Chunks whose counts are read at once, tiles whose experts are found at once, rows that are marked at once.
COUNTS, TILES, MARKS = 32, 32, 1024


@dataclass
class Buckets:
    """Pairs by expert. Pair ``t * K + k`` is the k-th choice of token t.

    Attributes:
        pairs: int32 [max_tiles * rows], the pair of each row; the number of pairs in rows that pad a tile.
        expert: int32 [max_tiles], of each tile; tiles from ``num_tiles`` on are not written.
        num_tiles: int32 [1], on the device.
        max_tiles: at least the tiles of any choice of experts.
    """

    pairs: torch.Tensor
    expert: torch.Tensor
    num_tiles: torch.Tensor
    max_tiles: int


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _count_kernel(
    ids,
    counts,
    pairs,
    num_pairs,
    num_rows,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    MARKS: tl.constexpr,
):
    """How many pairs of a chunk each expert has; and all rows are marked as padding."""
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    # what is no pair falls into a bin behind the experts'
    bins = tl.histogram(tl.load(ids + i, mask=i < num_pairs, other=BLOCK_E), 2 * BLOCK_E)
    expert = tl.arange(0, 2 * BLOCK_E)
    tl.store(counts + chunk * E + expert, bins, mask=expert < E)
    for first in range(chunk * MARKS, num_rows, num_chunks * MARKS):
        row = first + tl.arange(0, MARKS)
        tl.store(pairs + row, tl.zeros([MARKS], tl.int32) + num_pairs, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _place_kernel(
    ids,
    counts,
    pairs,
    tile_expert,
    num_tiles,
    num_pairs,
    num_chunks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """A chunk's pairs, behind those of the same expert that come before them; and the experts of some tiles.

    There may be more programs than chunks, for the tiles.
    """
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_chunks, COUNTS):
        other = first + tl.arange(0, COUNTS)
        inside = (other < num_chunks)[:, None] & (expert < E)[None, :]
        found = tl.load(counts + other[:, None] * E + expert[None, :], mask=inside, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((other < chunk)[:, None], found, 0), 0)
    tiles = tl.cdiv(total, ROWS)
    end = tl.cumsum(tiles, 0)
    start = (end - tiles) * ROWS + before

    i = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = tl.load(ids + i, mask=i < num_pairs, other=0)
    earlier = (mine[None, :] == mine[:, None]) & (i[None, :] < i[:, None])
    row = tl.gather(start, mine, 0) + tl.sum(earlier.to(tl.int32), 1)
    tl.store(pairs + row, i, mask=i < num_pairs)

    last = tl.max(end, 0)
    for first in range(chunk * TILES, last, tl.num_programs(0) * TILES):
        tile = first + tl.arange(0, TILES)
        owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(tile_expert + tile, owner, mask=tile < last)
    if chunk == 0:
        tl.store(num_tiles, last)


def make_buckets(ids: torch.Tensor, num_experts: int, rows: int) -> Buckets:
    """Bring pairs into the order of experts.

    Args:
        ids: int32 [T, K], contiguous.
        rows: of a tile, a power of two.
    """
    num_pairs = ids.numel()
    # Each expert that has pairs may leave one tile unfilled.
    max_tiles = min(num_pairs, num_pairs // rows + min(num_experts, num_pairs))
    chunk = CHUNK if num_pairs > FEW_PAIRS else SMALL_CHUNK
    num_chunks, block = triton.cdiv(num_pairs, chunk), triton.next_power_of_2(num_experts)
    counts, expert, num_tiles, pairs = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_chunks * num_experts, max_tiles, 1, max_tiles * rows)
    )
    _count_kernel[(num_chunks,)](
        ids, counts, pairs, num_pairs, pairs.numel(), E=num_experts, BLOCK_E=block, CHUNK=chunk, MARKS=MARKS
    )
    _place_kernel[(max(num_chunks, triton.cdiv(max_tiles, TILES)),)](
        ids,
        counts,
        pairs,
        expert,
        num_tiles,
        num_pairs,
        num_chunks,
        E=num_experts,
        BLOCK_E=block,
        ROWS=rows,
        CHUNK=chunk,
        COUNTS=min(COUNTS, triton.next_power_of_2(num_chunks)),
        TILES=TILES,
    )
    return Buckets(pairs, expert, num_tiles, max_tiles)

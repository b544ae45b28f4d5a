# mypy: disable-error-code="no-untyped-def"
"""(token, expert) pairs in the order of experts, cut into tiles of one expert each, without the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Pairs that a program looks at together.
CHUNK = 1024


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


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids, counts, num_pairs, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        i = first + tl.arange(0, CHUNK)
        total += (tl.load(ids + i, mask=i < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids,
    counts,
    pairs,
    tile_expert,
    num_tiles,
    num_pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program an expert: its pairs, in order, from the first row of its first tile on."""
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    tiles = tl.cdiv(tl.load(counts + other, mask=other < E, other=0), ROWS)
    begin = tl.sum(tl.where(other < expert, tiles, 0), 0)
    end = begin + tl.sum(tl.where(other == expert, tiles, 0), 0)
    row = begin * ROWS
    if end > begin:
        for first in range(0, num_pairs, CHUNK):
            i = first + tl.arange(0, CHUNK)
            mine = (tl.load(ids + i, mask=i < num_pairs, other=-1) == expert).to(tl.int32)
            tl.store(pairs + row + tl.cumsum(mine, 0) - 1, i, mask=mine > 0)
            row += tl.sum(mine, 0)
    padding = row + tl.arange(0, ROWS)
    tl.store(pairs + padding, tl.zeros([ROWS], tl.int32) + num_pairs, mask=padding < end * ROWS)
    for tile in range(begin, end):
        tl.store(tile_expert + tile, expert)
    if expert == E - 1:
        tl.store(num_tiles, end)


def make_buckets(ids: torch.Tensor, num_experts: int, rows: int) -> Buckets:
    """Bring pairs into the order of experts.

    Args:
        ids: int32 [T, K], contiguous.
        rows: of a tile, a power of two.
    """
    num_pairs = ids.numel()
    # Each expert that has pairs may leave one tile unfilled.
    max_tiles = min(num_pairs, num_pairs // rows + min(num_experts, num_pairs))
    counts, expert, num_tiles, pairs = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts, max_tiles, 1, max_tiles * rows)
    )
    _count_kernel[(num_experts,)](ids, counts, num_pairs, CHUNK=CHUNK)
    _place_kernel[(num_experts,)](
        ids,
        counts,
        pairs,
        expert,
        num_tiles,
        num_pairs,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        ROWS=rows,
        CHUNK=CHUNK,
    )
    return Buckets(pairs, expert, num_tiles, max_tiles)

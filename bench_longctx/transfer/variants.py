"""The gather kernels, in the shapes that are tried, and the rows that are moved."""

from __future__ import annotations

import numpy as np

from herald.transfer import GatherKernel, RowMove

SHARED_KIB = (16, 32, 64, 128, 200)


def registers() -> GatherKernel:
    """The kernel for every device: 64 KiB under way in a block's registers."""
    return GatherKernel("registers", warps=16, depth=8)


def bulk(shared_kib: int, row_bytes: int, warps: int = 0) -> GatherKernel:
    """`gather_bulk.cu` within so much shared memory; ``warps`` 0 for one, two or four by its size."""
    warps = warps or (1 if shared_kib < 64 else 2 if shared_kib < 128 else 4)
    slots = ((shared_kib << 10) // warps - 128) // (row_bytes + 8)
    depth = max(4, -(-slots // 32))
    return GatherKernel("bulk", warps, depth, width=max(1, min(32, slots // depth)))


def sorted_move(rng: np.random.Generator, pool_rows: int, n: int) -> RowMove:
    """``n`` rows of the whole pool in rising order."""
    src = np.sort(rng.choice(pool_rows, n, replace=False)).astype(np.int64)
    return RowMove(src, np.arange(n, dtype=np.int64))


def scattered_move(rng: np.random.Generator, pool_rows: int, arena_rows: int, n: int) -> RowMove:
    """``n`` rows in any order, some of them twice, to destinations in any order: for checks."""
    return RowMove(rng.integers(0, pool_rows, n), rng.permutation(arena_rows)[:n].astype(np.int64))


def difference_move(
    rng: np.random.Generator,
    first_row: int,
    layers: int,
    heads: int,
    positions: int,
    arrivals: int,
    page_size: int = 32,
) -> RowMove:
    """What a block's selection brings: ``arrivals`` of the positions of every layer and KV head.

    Args:
        first_row: of the request in the pool, which is laid out [layer, page, head, position of the page].
        positions: of the prefix, a multiple of ``page_size``.
    """
    src = []
    for layer in range(layers):
        for head in range(heads):
            position = np.sort(rng.choice(positions, arrivals, replace=False))
            page = layer * (positions // page_size) + position // page_size
            src.append((page * heads + head) * page_size + position % page_size)
    rows = first_row + np.concatenate(src).astype(np.int64)
    return RowMove(rows, np.arange(len(rows), dtype=np.int64))

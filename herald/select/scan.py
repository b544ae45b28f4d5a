"""Scores of the rows of one layer and KV head. nogil numba.

A score says how much attention row j of page P gets from query q, one of M positions x G grouped heads:
scale * q.k - lse[q], plus a constant of the layer and head. All queries of a (layer, KV head) are rotated and
quantised to int8 together, with one query_scale. In float32, fused only where it says fma (one rounding), and
in exactly this order:

    reach    = query_scale * scale
    mean_dot = 128 * (query_code[q] . mean_high[P]) + query_code[q] . mean_low[P]
    shift[q] = fma(float32(mean_dot), reach * mean_scale[P], least_lse - lse[q])

where least_lse is the smallest of the queries' lse. query_scale brings the largest |rotated value| of queries
with least_lse - lse > -inf to 127; the others saturate. 8 bits, in integers from there on:

    unit     = reach * key_scale[P]
    start[q] = int32(rint(min(max(shift[q] * (1 / unit), -2 ** 30), 2 ** 30)))
    score    = float32(start[q] + query_code[q] . key_code[j]) * unit

4 and 1 bits:

    score    = fma(float32(query_code[q] . key_code[j]), reach * row_scale[j], shift[q])

All dots are exact: below 2 ** 24, mean_dot below 2 ** 31. Queries with lse = inf, and NaN, start at -2 ** 30
or score -inf, and so never count. The query with the smallest lse starts within 2 ** 29 of 0 (`key_codes`
bounds the ratio of mean_scale and key_scale), so none that starts at -2 ** 30 can be a row's largest.

With 16 bits there are no codes: score = fma(q . key, scale, -lse[q]) with q . key a chain of fma in order of
the dimension, from 0. The kernels of csrc give the same bits.

"max": the row's score is the largest over all queries. "sum": with m that largest,
m + log(sum of exp(score - m)), where lane i of 16 adds queries i, i + 16, ... in order, lanes 0 .. 15 are
then added in order, and log is taken in float64. Queries are padded to a multiple of 16 with lse = inf.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from herald.jit import jit
from herald.kvstore.key_codes import SMALLEST_MAXIMUM, largest_magnitude, pack_8, rotate
from herald.kvstore.row_values import BFLOAT16, load_keys
from herald.kvstore.vectors import fma
from herald.select.log_sum import log_of_sum
from herald.select.tiles import dots, exact_dots, largest_score, largest_sums, unpack
from herald.select.topk import top_k

# Pages whose offsets are computed together.
PAGE_GROUP = 16

# Far below any start that can win, and far enough from the ends of int32 for any dot to be added.
FARTHEST_START = np.float32(2**30)

# The pool and index as arrays; `bits` and `kind` as in KeyIndex.
Store = namedtuple(
    "Store", ["rows", "codes", "row_scales", "mean_codes", "page_scales", "signs", "bits", "kind"]
)

# Buffers of one thread; width is M * G rounded up to 16, n the padded head_dim.
#   row_buffer  [page_size to a multiple of 4, n or D] uint8 (VNNI) or float32: a page's codes or keys
#   mean_buffer [2 * PAGE_GROUP, n] of the same kind: high and low codes of one mean after the other
#   rotated     float32 [width, n]: queries
#   packed      int8 [n / 4, width, 4] or float32 [n, width, 1]: query codes
#   raw         float32 [D, width]: queries as they came
#   lse         float32 [width]
#   excess      int32 [width]: -128 * the sum of a query's codes (VNNI; else 0)
#   mean_dots   float32 [2 * PAGE_GROUP, width], shifts float32 [PAGE_GROUP, width]
#   starts      int32 [width], best int32 [rows of row_buffer, 16], largest int32 [as many]
#   tile        float32 [as many, width]
#   scores      float32 [rows], keys uint32 [rows], histogram int32 [2048]
Workspace = namedtuple(
    "Workspace",
    [
        "row_buffer",
        "mean_buffer",
        "rotated",
        "packed",
        "raw",
        "lse",
        "excess",
        "mean_dots",
        "shifts",
        "starts",
        "best",
        "largest",
        "tile",
        "scores",
        "keys",
        "histogram",
    ],
)


@jit
def load_queries(queries: np.ndarray, lse: np.ndarray, group: int, head: int, work: Workspace) -> None:
    """Put the queries of one KV head into ``work.raw`` and ``work.lse``: query m * G + g.

    ``queries`` [M, Hq, D] float32 or uint16 (bfloat16) and ``lse`` [M, Hq] float32 of one layer.
    """
    work.raw.fill(np.float32(0))
    work.lse.fill(np.float32(np.inf))
    heads = np.empty((group, queries.shape[2]), dtype=np.float32)
    for m in range(queries.shape[0]):
        load_keys(queries[m], head * group, group, BFLOAT16, heads)
        for g in range(group):
            query = m * group + g
            work.lse[query] = lse[m, head * group + g]
            for d in range(queries.shape[2]):
                work.raw[d, query] = heads[g, d]


@jit
def _least_lse(lse: np.ndarray) -> np.float32:
    least = np.float32(np.inf)
    for q in range(lse.size):
        least = lse[q] if lse[q] < least else least
    return least


@jit
def quantise_queries(count: int, signs: np.ndarray, work: Workspace) -> np.float32:
    """Rotate the first ``count`` queries and quantise them to int8 with one scale, which is returned.

    Queries that cannot count have no say in the scale, and saturate.
    """
    n = signs.size
    query = np.empty(work.raw.shape[0], dtype=np.float32)
    for q in range(count):
        for d in range(query.size):
            query[d] = work.raw[d, q]
        rotate(query, signs, work.rotated[q])
    least = _least_lse(work.lse)
    largest = np.float32(0)
    for q in range(count):
        if least - work.lse[q] > -np.inf:
            of_query = largest_magnitude(work.rotated[q])
            largest = largest if of_query < largest else of_query
    inverse = np.float32(0)
    scale = np.float32(0)
    if largest >= SMALLEST_MAXIMUM:
        inverse = np.float32(127) / largest
        scale = (largest * np.float32(1.0 / np.sqrt(n))) / np.float32(127)
    work.excess.fill(0)
    work.packed.fill(0)
    codes = np.empty(n, dtype=np.uint8)
    for q in range(count):
        pack_8(work.rotated[q], inverse, codes)
        signed = codes.view(np.int8)
        total = 0
        for d in range(n):
            total += signed[d]
            _place_code(work.packed, d, q, signed[d])
        if work.packed.shape[2] == 4:
            work.excess[q] = -128 * total
    return scale


@jit
def _place_code(packed: np.ndarray, d: int, query: int, code: np.int8) -> None:
    """``packed`` has 4 dimensions a group for VNNI and 1 for floats: [n / group, width, group]."""
    group = packed.shape[2]
    packed[d // group, query, d % group] = code


@jit
def reduce_max(
    tile: np.ndarray, count: int, reach: np.float32, scales: np.ndarray, shifts: np.ndarray, out: np.ndarray
) -> None:
    """``out[r] = max over q of fma(tile[r, q], reach * scales[r], shifts[q])``."""
    for r in range(count):
        out[r] = largest_score(tile, r, shifts.size, reach * scales[r], shifts)


@jit
def reduce_sum(
    tile: np.ndarray, count: int, reach: np.float32, scales: np.ndarray, shifts: np.ndarray, out: np.ndarray
) -> None:
    """Log of the sum over queries of exp of `reduce_max`'s scores. Overwrites ``tile``."""
    bits = np.empty(tile.shape[1], dtype=np.int32)
    reduce_max(tile, count, reach, scales, shifts, out)
    for r in range(count):
        row = tile[r]
        for q in range(row.size):
            row[q] = fma(row[q], reach * scales[r], shifts[q])
        out[r] = log_of_sum(row, out[r], bits)


@jit
def _sum_of_page(tile: np.ndarray, count: int, starts: np.ndarray, unit: np.float32, out: np.ndarray) -> None:
    """`reduce_sum` of 8-bit dots. Overwrites ``tile``."""
    bits = np.empty(tile.shape[1], dtype=np.int32)
    for r in range(count):
        row = tile[r]
        largest = np.int32(-(2**31))
        for q in range(row.size):
            largest = max(largest, np.int32(row[q]) + starts[q])
        for q in range(row.size):
            row[q] = np.float32(np.int32(row[q]) + starts[q]) * unit
        out[r] = log_of_sum(row, np.float32(largest) * unit, bits)


@jit
def _page_shifts(
    store: Store, layer: int, head: int, page_ids: np.ndarray, reach: np.float32, work: Workspace
) -> None:
    """``work.shifts[i]`` of page ``page_ids[i]``, of up to `PAGE_GROUP` pages."""
    for i in range(page_ids.size):
        codes = store.mean_codes[layer, page_ids[i], head].view(np.uint8)
        unpack(codes, 0, 2, 8, work.mean_buffer[2 * i : 2 * i + 2])
    dots(work.mean_buffer, 2 * page_ids.size, work.packed, work.packed.shape[0], work.excess, work.mean_dots)
    least = _least_lse(work.lse)
    for i in range(page_ids.size):
        high, low, shifts = work.mean_dots[2 * i], work.mean_dots[2 * i + 1], work.shifts[i]
        unit = reach * store.page_scales[layer, page_ids[i], head, 1]
        for q in range(shifts.size):
            dot = np.int32(high[q]) * np.int32(128) + np.int32(low[q])
            shifts[q] = fma(np.float32(np.int32(dot)), unit, least - work.lse[q])


@jit
def _page_starts(shifts: np.ndarray, unit: np.float32, starts: np.ndarray) -> None:
    inverse = np.divide(np.float32(1), unit)  # inf where unit is 0; the operator would raise
    for q in range(shifts.size):
        value = shifts[q] * inverse
        value = value if value > -FARTHEST_START else -FARTHEST_START
        value = value if value < FARTHEST_START else FARTHEST_START
        starts[q] = np.int32(np.rint(value))


@jit
def _score_page_of_8_bits(
    count: int, shifts: np.ndarray, unit: np.float32, use_sum: bool, work: Workspace, out: np.ndarray
) -> None:
    """Scores of the first ``count`` rows of ``work.row_buffer``."""
    steps = work.packed.shape[0]
    _page_starts(shifts, unit, work.starts)
    if use_sum:
        dots(work.row_buffer, count, work.packed, steps, work.excess, work.tile)
        _sum_of_page(work.tile, count, work.starts, unit, out)
        return
    for q in range(work.starts.size):
        work.starts[q] += work.excess[q]
    largest_sums(work.row_buffer, count, work.packed, steps, work.starts, work.best, work.largest)
    for r in range(count):
        out[r] = np.float32(work.largest[r]) * unit


@jit
def scan_codes(
    store: Store,
    layer: int,
    head: int,
    page_ids: np.ndarray,
    first: int,
    last: int,
    reach: np.float32,
    use_sum: bool,
    work: Workspace,
) -> None:
    """``work.scores[: last - first]`` of positions first .. last from the codes of the index."""
    page_size = store.codes.shape[3]
    last_block = (last + page_size - 1) // page_size
    for block in range(first // page_size, last_block):
        in_group = (block - first // page_size) % PAGE_GROUP
        if in_group == 0:
            _page_shifts(
                store, layer, head, page_ids[block : min(block + PAGE_GROUP, last_block)], reach, work
            )
        page = page_ids[block]
        start = max(0, first - block * page_size)
        count = min(page_size, last - block * page_size) - start
        unpack(store.codes[layer, page, head], start, count, store.bits, work.row_buffer)
        out = work.scores[block * page_size + start - first :]
        shifts = work.shifts[in_group]
        if store.bits == 8:
            unit = reach * store.page_scales[layer, page, head, 0]
            _score_page_of_8_bits(count, shifts, unit, use_sum, work, out)
            continue
        dots(work.row_buffer, count, work.packed, work.packed.shape[0], work.excess, work.tile)
        scales = store.row_scales[layer, page, head, start : start + count]
        if use_sum:
            reduce_sum(work.tile, count, reach, scales, shifts, out)
        else:
            reduce_max(work.tile, count, reach, scales, shifts, out)


@jit
def scan_rows(
    store: Store,
    layer: int,
    head: int,
    page_ids: np.ndarray,
    first: int,
    last: int,
    scale: np.float32,
    use_sum: bool,
    work: Workspace,
) -> None:
    """``work.scores[: last - first]`` of positions first .. last from the keys of the pool."""
    page_size = store.rows.shape[3]
    shifts = work.shifts[0]
    for q in range(shifts.size):
        shifts[q] = -work.lse[q]
    ones = np.ones(page_size, dtype=np.float32)
    for block in range(first // page_size, (last + page_size - 1) // page_size):
        start = max(0, first - block * page_size)
        count = min(page_size, last - block * page_size) - start
        load_keys(store.rows[layer, page_ids[block], head], start, count, store.kind, work.row_buffer)
        exact_dots(work.row_buffer, count, work.raw, work.excess, work.tile)
        out = work.scores[block * page_size + start - first :]
        if use_sum:
            reduce_sum(work.tile, count, scale, ones, shifts, out)
        else:
            reduce_max(work.tile, count, scale, ones, shifts, out)


@jit
def select_from_codes(
    store: Store,
    tasks: tuple[int, int],
    page_ids: np.ndarray,
    first: int,
    last: int,
    queries: np.ndarray,
    lse: np.ndarray,
    scale: np.float32,
    use_sum: bool,
    work: Workspace,
    out: np.ndarray,
) -> None:
    """Top k of tasks ``tasks[0] .. tasks[1]``, task t being layer t // H and KV head t % H.

    ``queries`` [L, M, Hq, D] float32 or uint16, ``lse`` [L, M, Hq] float32, ``out`` [L, H, k] int32.
    """
    num_heads = out.shape[1]
    group = queries.shape[2] // num_heads
    for task in range(tasks[0], tasks[1]):
        layer, head = task // num_heads, task % num_heads
        load_queries(queries[layer], lse[layer], group, head, work)
        reach = quantise_queries(queries.shape[1] * group, store.signs, work) * scale
        scan_codes(store, layer, head, page_ids, first, last, reach, use_sum, work)
        scores = work.scores[: last - first]
        top_k(scores, out.shape[2], first, work.keys, work.histogram, out[layer, head])


@jit
def select_from_rows(
    store: Store,
    tasks: tuple[int, int],
    page_ids: np.ndarray,
    first: int,
    last: int,
    queries: np.ndarray,
    lse: np.ndarray,
    scale: np.float32,
    use_sum: bool,
    work: Workspace,
    out: np.ndarray,
) -> None:
    """`select_from_codes` without an index, on the keys of the pool."""
    num_heads = out.shape[1]
    group = queries.shape[2] // num_heads
    for task in range(tasks[0], tasks[1]):
        layer, head = task // num_heads, task % num_heads
        load_queries(queries[layer], lse[layer], group, head, work)
        scan_rows(store, layer, head, page_ids, first, last, scale, use_sum, work)
        scores = work.scores[: last - first]
        top_k(scores, out.shape[2], first, work.keys, work.histogram, out[layer, head])

"""Scores of the rows of one layer and KV head. nogil numba.

The score of row j of page P for query q (one of M positions x G grouped heads), in float32 and in exactly
this order, no operation fused:

    factor = (query_scale[q] * scale) * key_scale[j]
    offset = (q . mean[P]) * scale - lse[q]
    score  = float32(query_code[q] . key_code[j]) * factor + offset

The dot of codes is an exact integer below 2 ** 24; q . mean is summed in order of the dimension. With 16 bits
there are no codes: dot is q . key in float32, summed in order of the dimension, factor = scale and
offset = -lse[q].

"max": the row's score is the largest over all queries. "sum": with m that largest,
m + log(sum of exp(score - m)), where lane i of 16 adds queries i, i + 16, ... in order, lanes 0 .. 15 are
then added in order, and log is taken in float64. Queries are padded to a multiple of 16 with score -inf.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from herald.jit import jit
from herald.kvstore.key_codes import quantise, walsh_hadamard
from herald.kvstore.row_values import load_keys
from herald.select.tiles import dots, exact_dots, largest_score, unpack
from herald.select.topk import top_k

# Pages whose offsets are computed together.
PAGE_GROUP = 16

# The pool and index as arrays; `bits` and `kind` as in KeyIndex.
Store = namedtuple("Store", ["rows", "codes", "scales", "means", "signs", "bits", "kind"])

# Buffers of one thread; width is M * G rounded up to 16, n the padded head_dim.
#   row_buffer  [page_size to a multiple of 4, n or D] uint8 (VNNI) or float32: a page's codes or keys
#   packed      int8 [n / 4, width, 4] or float32 [n, width, 1]: query codes
#   raw         float32 [D, width]: queries as they came
#   correction, query_scale, lse [width]
#   mean_buffer float32 [PAGE_GROUP, D], offsets [PAGE_GROUP, width]
#   tile        float32 [as many, width]
#   scores      float32 [rows], keys uint32 [rows], histogram int32 [2048]
Workspace = namedtuple(
    "Workspace",
    [
        "row_buffer",
        "packed",
        "raw",
        "correction",
        "query_scale",
        "lse",
        "mean_buffer",
        "offsets",
        "tile",
        "scores",
        "keys",
        "histogram",
    ],
)


@jit
def load_queries(queries: np.ndarray, lse: np.ndarray, group: int, head: int, work: Workspace) -> None:
    """Put the queries of one KV head into ``work.raw`` and ``work.lse``: query m * G + g.

    ``queries`` [M, Hq, D] and ``lse`` [M, Hq] float32 of one layer.
    """
    work.raw.fill(np.float32(0))
    work.lse.fill(np.float32(np.inf))
    for m in range(queries.shape[0]):
        for g in range(group):
            query = m * group + g
            work.lse[query] = lse[m, head * group + g]
            for d in range(queries.shape[2]):
                work.raw[d, query] = queries[m, head * group + g, d]


@jit
def quantise_queries(count: int, signs: np.ndarray, work: Workspace) -> None:
    """Rotate and quantise the first ``count`` queries to int8, as keys of 8 bits are."""
    head_dim = work.raw.shape[0]
    n = signs.size
    norm = np.float32(1.0 / np.sqrt(n))
    x = np.empty(n, dtype=np.float32)
    codes = np.empty(n, dtype=np.uint8)
    work.query_scale.fill(np.float32(0))
    work.correction.fill(0)
    work.packed.fill(0)
    for query in range(count):
        x.fill(np.float32(0))
        for d in range(head_dim):
            x[d] = work.raw[d, query] * signs[d]
        walsh_hadamard(x)
        work.query_scale[query] = quantise(x, 8, norm, codes)
        signed = codes.view(np.int8)
        total = 0
        for d in range(n):
            total += signed[d]
            _place_code(work.packed, d, query, signed[d])
        work.correction[query] = 128 * total


@jit
def _place_code(packed: np.ndarray, d: int, query: int, code: np.int8) -> None:
    """``packed`` has 4 dimensions a group for VNNI and 1 for floats: [n / group, width, group]."""
    group = packed.shape[2]
    packed[d // group, query, d % group] = code


@jit
def reduce_max(
    tile: np.ndarray,
    count: int,
    factors: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
) -> None:
    """``out[r] = max over q of tile[r, q] * (factors[q] * scales[r]) + offsets[q]``."""
    for r in range(count):
        out[r] = largest_score(tile, r, factors.size, factors, scales[r], offsets)


@jit
def _exp(x: np.ndarray, bits: np.ndarray) -> None:
    """exp of ``x`` <= 0 in place, float32, relative error below 3e-7: n ln 2 + r, then a polynomial in r.

    Coefficients are those of the Cephes library's expf. ``bits`` is scratch, int32, as long as ``x``.
    """
    for i in range(x.size):
        v = max(x[i], np.float32(-87.0))
        n = np.rint(v * np.float32(1.44269504))
        r = v - n * np.float32(0.693359375)
        r = r - n * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        x[i] = p * (r * r) + r + np.float32(1.0)
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(x.size):
        x[i] *= powers[i]


@jit
def _sum_in_lanes(x: np.ndarray) -> np.float32:
    lanes = x[:16]
    for start in range(16, x.size, 16):
        part = x[start : start + 16]
        for i in range(lanes.size):
            lanes[i] += part[i]
    total = np.float32(0)
    for i in range(16):
        total += lanes[i]
    return total


@jit
def reduce_sum(
    tile: np.ndarray,
    count: int,
    factors: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
) -> None:
    """Log of the sum over queries of exp of `reduce_max`'s scores. Overwrites ``tile``."""
    bits = np.empty(tile.shape[1], dtype=np.int32)
    reduce_max(tile, count, factors, scales, offsets, out)
    for r in range(count):
        row = tile[r]
        for q in range(row.size):
            row[q] = (row[q] * (factors[q] * scales[r]) + offsets[q]) - out[r]
        _exp(row, bits)
        out[r] = np.float32(np.float64(out[r]) + np.log(np.float64(_sum_in_lanes(row))))


@jit
def _page_offsets(
    means: np.ndarray, page_ids: np.ndarray, head: int, scale: np.float32, work: Workspace
) -> None:
    """``work.offsets[i] = (q . mean of page_ids[i]) * scale - lse`` for up to `PAGE_GROUP` pages."""
    for i in range(page_ids.size):
        mean = means[page_ids[i], head]
        for d in range(mean.size):
            work.mean_buffer[i, d] = mean[d]
    exact_dots(work.mean_buffer, page_ids.size, work.raw, work.correction, work.offsets)
    for i in range(page_ids.size):
        row = work.offsets[i]
        for q in range(row.size):
            row[q] = row[q] * scale - work.lse[q]


@jit
def scan_codes(
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
    """``work.scores[: last - first]`` of positions first .. last from the codes of the index."""
    page_size = store.scales.shape[3]
    steps = work.packed.shape[0]
    factors = work.query_scale
    for q in range(factors.size):
        factors[q] *= scale
    last_block = (last + page_size - 1) // page_size
    for block in range(first // page_size, last_block):
        in_group = (block - first // page_size) % PAGE_GROUP
        if in_group == 0:
            group = page_ids[block : min(block + PAGE_GROUP, last_block)]
            _page_offsets(store.means[layer], group, head, scale, work)
        page = page_ids[block]
        start = max(0, first - block * page_size)
        count = min(page_size, last - block * page_size) - start
        unpack(store.codes[layer, page, head], start, count, store.bits, work.row_buffer)
        dots(work.row_buffer, count, work.packed, steps, work.correction, work.tile)
        scales = store.scales[layer, page, head, start : start + count]
        out = work.scores[block * page_size + start - first :]
        if use_sum:
            reduce_sum(work.tile, count, factors, scales, work.offsets[in_group], out)
        else:
            reduce_max(work.tile, count, factors, scales, work.offsets[in_group], out)


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
    work.query_scale.fill(scale)
    offsets = work.offsets[0]
    for q in range(offsets.size):
        offsets[q] = -work.lse[q]
    ones = np.ones(page_size, dtype=np.float32)
    for block in range(first // page_size, (last + page_size - 1) // page_size):
        start = max(0, first - block * page_size)
        count = min(page_size, last - block * page_size) - start
        load_keys(store.rows[layer, page_ids[block], head], start, count, store.kind, work.row_buffer)
        exact_dots(work.row_buffer, count, work.raw, work.correction, work.tile)
        out = work.scores[block * page_size + start - first :]
        if use_sum:
            reduce_sum(work.tile, count, work.query_scale, ones, offsets, out)
        else:
            reduce_max(work.tile, count, work.query_scale, ones, offsets, out)


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

    ``queries`` [L, M, Hq, D], ``lse`` [L, M, Hq] float32, ``out`` [L, H, k] int32.
    """
    num_heads = out.shape[1]
    group = queries.shape[2] // num_heads
    for task in range(tasks[0], tasks[1]):
        layer, head = task // num_heads, task % num_heads
        load_queries(queries[layer], lse[layer], group, head, work)
        quantise_queries(queries.shape[1] * group, store.signs, work)
        scan_codes(store, layer, head, page_ids, first, last, scale, use_sum, work)
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

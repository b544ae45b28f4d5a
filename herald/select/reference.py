"""Selection in plain numpy: what the compiled selector must give, bit by bit. For tests."""

from __future__ import annotations

import numpy as np

from herald.config import ScoreOperator
from herald.kvstore import reference as codes_reference
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.pool import HostPool

_LANES = 16


def top_k_reference(scores: np.ndarray, k: int, first: int) -> np.ndarray:
    """Positions of the k highest of ``scores`` [n], ascending; ties go to the lower position."""
    order = np.argsort(-scores, kind="stable")[:k]
    return (np.sort(order) + first).astype(np.int32)


def _dots_in_order(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[n, D] x [count, D] -> [count, n]: every product and every sum rounded, in order of the dimension."""
    total = np.zeros((len(rows), len(queries)), dtype=np.float32)
    for d in range(rows.shape[1]):
        total += rows[:, d, None] * queries[None, :, d]
    return total


def _exp(x: np.ndarray) -> np.ndarray:
    v = np.maximum(x, np.float32(-87.0))
    n = np.rint(v * np.float32(1.44269504))
    r = v - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.full_like(v, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + np.float32(c)
    return (p * (r * r) + r + np.float32(1.0)) * np.ldexp(np.float32(1), n.astype(np.int32))


def reduce_reference(scores: np.ndarray, operator: ScoreOperator) -> np.ndarray:
    """Scores [count, M * G] -> [count] by the operator, in the order that `scan` fixes."""
    best = scores.max(axis=1)
    if operator == "max":
        return best
    count, width = scores.shape
    padded = np.full((count, -(-width // _LANES) * _LANES), -np.inf, dtype=np.float32)
    padded[:, :width] = scores
    terms = _exp(padded - best[:, None])
    lanes = np.zeros((count, _LANES), dtype=np.float32)
    for part in np.split(terms, terms.shape[1] // _LANES, axis=1):
        lanes += part
    total = np.zeros(count, dtype=np.float32)
    for lane in lanes.T:
        total += lane
    return (best.astype(np.float64) + np.log(total.astype(np.float64))).astype(np.float32)


def score_reference(
    pool: HostPool,
    index: KeyIndex,
    page_ids: np.ndarray,
    first: int,
    last: int,
    queries: np.ndarray,
    lse: np.ndarray,
    scale: float,
    operator: ScoreOperator = "max",
) -> np.ndarray:
    """Scores float32 [L, H, last - first] by the formula of `scan`. Arguments as for `Selector.select`."""
    layout = pool.layout
    group = queries.shape[2] // layout.num_kv_heads
    factor = np.float32(scale)
    out = np.empty((layout.num_layers, layout.num_kv_heads, last - first), dtype=np.float32)
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            asked = queries[layer, :, heads].reshape(-1, layout.head_dim)
            norms = lse[layer, :, heads].reshape(-1)
            for block in range(first // layout.page_size, -(-last // layout.page_size)):
                begin = max(first, block * layout.page_size)
                end = min(last, (block + 1) * layout.page_size)
                rows = slice(begin - block * layout.page_size, end - block * layout.page_size)
                at = (layer, int(page_ids[block]), head)
                scores = _page_scores(pool, index, at, rows, asked, norms, factor)
                out[layer, head, begin - first : end - first] = reduce_reference(scores, operator)
    return out


def _page_scores(
    pool: HostPool,
    index: KeyIndex,
    at: tuple[int, int, int],
    rows: slice,
    queries: np.ndarray,
    lse: np.ndarray,
    scale: np.float32,
) -> np.ndarray:
    """Scores [count, M * G] of some rows of page ``at`` = (layer, page, head)."""
    if index.bits == 16:
        keys = pool.rows[at][rows, : pool.layout.head_dim].float().numpy()
        return _dots_in_order(queries, keys) * scale + -lse
    codes, query_scales = codes_reference.quantise(codes_reference.rotate(queries, index.signs), 8)
    key_codes = codes_reference.unpack(index.codes[at][rows], index.bits)
    dots = key_codes.astype(np.int32) @ codes.astype(np.int32).T
    factors = (query_scales * scale)[None, :] * index.scales[at][rows][:, None]
    offsets = _dots_in_order(queries, index.means[at][None])[0] * scale - lse
    return dots.astype(np.float32) * factors + offsets


def select_reference(
    pool: HostPool,
    index: KeyIndex,
    page_ids: np.ndarray,
    first: int,
    last: int,
    k: int,
    queries: np.ndarray,
    lse: np.ndarray,
    scale: float,
    operator: ScoreOperator = "max",
) -> np.ndarray:
    """`Selector.select` with `score_reference` and a stable sort: int32 [L, H, k]."""
    scores = score_reference(pool, index, page_ids, first, last, queries, lse, scale, operator)
    flat = [top_k_reference(row, k, first) for row in scores.reshape(-1, last - first)]
    return np.array(flat, dtype=np.int32).reshape(*scores.shape[:2], k)

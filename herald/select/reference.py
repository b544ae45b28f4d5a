"""Selection and updates in plain numpy: what the compiled selector must give, bit by bit. For tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from herald.config import ScoreOperator
from herald.kvstore import reference as codes_reference
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.pool import HostPool
from herald.select.update import Plan, SlotGeometry

_LANES = 16


def top_k_reference(scores: np.ndarray, k: int, first: int) -> np.ndarray:
    """Positions of the k highest of ``scores`` [n], ascending; ties go to the lower position."""
    order = np.argsort(-scores, kind="stable")[:k]
    return (np.sort(order) + first).astype(np.int32)


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """float32 ``a * b + c`` with one rounding.

    The product is exact in float64. The sum there is rounded to odd, so that rounding it once more to float32
    gives what one rounding would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(invalid="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        added = np.asarray(c, np.float64)
        total = np.atleast_1d(product + added)
        part = total - product
        error = (product - (total - part)) + (added - part)
        even = total.view(np.int64) & 1 == 0
        inexact = np.isfinite(error) & (error != 0) & even
        toward = np.where(error > 0, np.inf, -np.inf)
        return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


def _dots_in_order(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[n, D] x [count, D] -> [count, n]: a chain of fma in order of the dimension."""
    total = np.zeros((len(rows), len(queries)), dtype=np.float32)
    for d in range(rows.shape[1]):
        total = fma(rows[:, d, None], queries[None, :, d], total)
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
        return fma(_dots_in_order(queries, keys), scale, -lse)
    with np.errstate(invalid="ignore"):
        lead = lse.min() - lse
    rotated = codes_reference.rotate(queries, index.signs)
    codes, query_scale = codes_reference.quantise_together(rotated, lead > -np.inf)
    codes = codes.astype(np.int32)
    reach = query_scale * scale
    high, low = index.mean_codes[at].astype(np.int32) @ codes.T
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean_dot = (128 * high + low).astype(np.float32)
        shift = fma(mean_dot, reach * index.page_scales[at][1], lead)
        dots = codes_reference.unpack(index.codes[at][rows], index.bits).astype(np.int32) @ codes.T
        if index.bits < 8:
            factors = reach * index.row_scales[at][rows]
            return fma(dots.astype(np.float32), factors[:, None], shift)
        unit = reach * index.page_scales[at][0]
        wanted = shift * (np.float32(1) / unit)
        farthest = np.float32(2**30)
        starts = np.rint(np.clip(np.where(np.isnan(wanted), -farthest, wanted), -farthest, farthest))
        return (dots + starts.astype(np.int32)).astype(np.float32) * unit


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


def plan_reference(
    pool: HostPool,
    slot_positions: np.ndarray,
    length: int,
    selected: np.ndarray,
    first: int,
    last: int,
    upto: int,
    page_ids: np.ndarray,
    own_rows: int,
    move_all: bool,
    geometry: SlotGeometry,
) -> Plan:
    """`Selector.plan_update`, one (layer, head) and one row after the other, nothing checked."""
    src, staging, to, free_rows = [], [], [], []
    counts = np.zeros(selected.shape[:2], dtype=np.int32)
    after = slot_positions.copy()
    num_heads = pool.layout.num_kv_heads
    for task in range(counts.size):
        layer, head = divmod(task, num_heads)
        base = task * geometry.capacity + geometry.row_start
        target = [*range(first), *selected[layer, head].tolist(), *range(last, upto)]
        kept: dict[int, int] = {}
        slots = []
        for slot, position in enumerate(slot_positions[layer, head, :length].tolist()):
            if position in target and position not in kept:
                kept[position] = slot
            else:
                slots.append(slot)
        slots.extend(range(length, slot_positions.shape[2]))
        moves = [p for p in target if p not in kept or (move_all and p < last)]
        for number, position in enumerate(moves):
            slot = kept[position] if position in kept else slots.pop(0)
            src.append(pool.row_ids(layer, head, page_ids, position))
            staging.append(base + geometry.num_slots + number)
            to.append(base + slot)
            after[layer, head, slot] = position
        counts[layer, head] = len(moves)
        for position in range(upto, upto + own_rows):
            slot = slots.pop(0)
            free_rows.append(base + slot)
            after[layer, head, slot] = position
    src_rows, staging_rows, slot_rows, own = (
        np.array(rows, dtype=np.int64) for rows in (src, staging, to, free_rows)
    )
    return Plan(src_rows, staging_rows, slot_rows, counts, own, after)

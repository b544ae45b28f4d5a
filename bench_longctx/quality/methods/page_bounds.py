"""`page_bounds`: whole pages of 16 rows by an upper bound of their scores (Quest, arXiv 2406.10774, section
3).

Of every page the smallest and the largest value of each key dimension are kept. A query's score for a page is
sum over d of max(q_d * min_d, q_d * max_d), which no key of the page can exceed; a page counts with its
largest score over the block's queries and the grouped heads, normalised as the engine normalises a row's.
Pages are taken by score until the budget is full, and the last one is cut to fit. Unlike the paper, which
keeps its first two layers dense, every layer has the same budget, as for all methods here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bench_longctx.quality.methods.base import (
    Method,
    PerRequest,
    RowSelector,
    WrappedSelector,
    as_float,
    keys_of,
)
from herald.engine.memory import HostStore
from herald.engine.prefill import FirstScores

PAGE = 16
# Positions whose keys are widened to float32 at once.
_PIECE = 4096


@dataclass
class Bounds:
    """Smallest and largest keys of a request's whole pages, float32 [L, H, pages, D] each."""

    low: np.ndarray
    high: np.ndarray

    @property
    def pages(self) -> int:
        return self.low.shape[2]


def bounds_of(keys: np.ndarray) -> Bounds:
    """Bounds of ``keys`` [L, H, n, D] in pages of `PAGE`; the last page may be short."""
    starts = np.arange(0, keys.shape[2], PAGE)
    return Bounds(np.minimum.reduceat(keys, starts, axis=2), np.maximum.reduceat(keys, starts, axis=2))


def page_scores(bounds: Bounds, queries: np.ndarray, lse: np.ndarray, scale: float) -> np.ndarray:
    """float32 [L, H, pages]: the largest upper bound over queries [L, M, Hq, D] and their group."""
    layers, heads = bounds.low.shape[:2]
    grouped = queries.reshape(*queries.shape[:2], heads, -1, queries.shape[3])
    asked = grouped.transpose(0, 2, 1, 3, 4).reshape(layers, heads, -1, queries.shape[3])  # [L, H, M * G, D]
    shift = lse.reshape(*lse.shape[:2], heads, -1).transpose(0, 2, 1, 3).reshape(layers, heads, 1, -1)
    upper = bounds.high @ np.maximum(asked, 0).swapaxes(2, 3) + bounds.low @ np.minimum(asked, 0).swapaxes(
        2, 3
    )
    return (upper * np.float32(scale) - shift).max(axis=3)


def rows_of_pages(scores: np.ndarray, first: int, last: int, k: int) -> np.ndarray:
    """int32 [L, H, k]: rows of [first, last), page by page in order of ``scores`` [L, H, pages].

    ``scores`` are of the pages from position 0 on that reach up to ``last``. Equal pages: the lower one
    first.
    """
    rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    positions = np.arange(first, last)
    order = rank[..., positions // PAGE] * PAGE + positions % PAGE
    chosen = np.argpartition(order, k - 1, axis=-1)[..., :k] if k else order[..., :0]
    return np.sort(chosen, axis=-1).astype(np.int32) + np.int32(first)


class PageBounds(WrappedSelector):
    """Keeps each request's bounds, adds those of pages that were filled since, and selects pages."""

    def __init__(self, inner: RowSelector, store: HostStore) -> None:
        super().__init__(inner, store)
        self._bounds: PerRequest[Bounds] = PerRequest()

    def select(
        self,
        page_ids: np.ndarray,
        first: int,
        last: int,
        k: int,
        queries: np.ndarray,
        lse: np.ndarray,
        scale: float,
    ) -> np.ndarray:
        if not 0 < k < last - first:
            return self.inner.select(page_ids, first, last, k, queries, lse, scale)
        bounds = self._bounds_up_to(page_ids, last)
        return rows_of_pages(page_scores(bounds, as_float(queries), lse, scale), first, last, k)

    def bytes_scanned(self, first: int, last: int, k: int) -> int:
        """Two bounds a page, in the pool's dtype."""
        layout = self.pool.layout
        pages = -(-last // PAGE) if 0 < k < last - first else 0
        return pages * layout.num_layers * layout.num_kv_heads * layout.row_bytes

    def _bounds_up_to(self, page_ids: np.ndarray, last: int) -> Bounds:
        """Bounds of all pages that reach below ``last``; only whole ones are kept."""
        known = self._bounds.get(page_ids)
        parts = [] if known is None else [known]
        done = 0 if known is None else known.pages * PAGE
        whole = last // PAGE * PAGE
        parts += [
            bounds_of(keys_of(self.pool, page_ids, begin, min(begin + _PIECE, whole)))
            for begin in range(done, whole, _PIECE)
        ]
        if len(parts) > 1 or known is None:
            known = _join(parts)
            if known is not None:
                self._bounds.set(page_ids, known)
        if last == whole:
            assert known is not None
            return known
        rest = bounds_of(keys_of(self.pool, page_ids, whole, last))
        return rest if known is None else Bounds(*_joined([known, rest]))


def _join(parts: list[Bounds]) -> Bounds | None:
    return Bounds(*_joined(parts)) if parts else None


def _joined(parts: list[Bounds]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([p.low for p in parts], axis=2), np.concatenate([p.high for p in parts], axis=2)


class Quest(Method):
    name = "page_bounds"
    about = "whole pages of 16 by their key bounds (Quest)"
    exact_keys = True
    uses_index = False
    uses_operator = False

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        return PageBounds(inner, store)

    def first_scores(self, inner: FirstScores) -> FirstScores:
        def scores(
            q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
        ) -> torch.Tensor:
            heads, count, width = rows.shape
            dim = width // 2
            pages = -(-count // PAGE)
            keys = torch.empty(heads, pages * PAGE, dim, device=rows.device)
            keys[:, :count] = rows[..., :dim]
            keys[:, count:] = keys[:, count - 1 : count]
            paged = keys.view(heads, pages, PAGE, dim)
            asked = q.float().unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)  # [H, M * G, D]
            shift = lse.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1)[:, None]
            upper = paged.amax(2) @ asked.clamp(min=0).mT + paged.amin(2) @ asked.clamp(max=0).mT
            score = (upper * scale - shift).amax(2)  # [H, pages]
            rank = torch.argsort(torch.argsort(score, dim=1, descending=True, stable=True), dim=1)
            place = torch.arange(count, device=rows.device)
            return -(rank[:, place // PAGE] * PAGE + place % PAGE).float()

        return scores

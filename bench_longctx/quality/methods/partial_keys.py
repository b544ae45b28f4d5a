"""`partial_keys`: scores from the few dimensions in which a query is largest (after InfiniGen, arXiv
2406.19707).

InfiniGen speculates with the columns of the query and key projections that matter most, after a rotation of
the weights that concentrates them. Here every query keeps the 30% of its dimensions of largest magnitude, the
rest is zero, and keys are exact: the part of the method that decides which rows are found. Its scan reads
whole keys all the same, so its selection time says nothing about InfiniGen's.
"""

from __future__ import annotations

import numpy as np
import torch

from bench_longctx.quality.methods.base import Method, RowSelector, WrappedSelector, as_float
from herald.engine.memory import HostStore
from herald.engine.prefill import FirstScores

SHARE = 0.3


def kept_dims(head_dim: int) -> int:
    """Dimensions of a query that are scored."""
    return max(1, round(SHARE * head_dim))


def largest_only(queries: np.ndarray) -> np.ndarray:
    """Queries [..., D] as float32 with all but their largest components set to 0."""
    values = as_float(queries)
    dim = values.shape[-1]
    small = np.argsort(-np.abs(values), axis=-1, kind="stable")[..., kept_dims(dim) :]
    out = values.copy()
    np.put_along_axis(out, small, np.float32(0), axis=-1)
    return out


class PartialQueries(WrappedSelector):
    """Hands queries on with their largest dimensions only."""

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
        return self.inner.select(page_ids, first, last, k, largest_only(queries), lse, scale)


class PartialKeys(Method):
    name = "partial_keys"
    about = "exact keys in the 30% largest dimensions of each query (after InfiniGen)"
    exact_keys = True
    uses_index = False

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        return PartialQueries(inner, store)

    def first_scores(self, inner: FirstScores) -> FirstScores:
        def scores(
            q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
        ) -> torch.Tensor:
            kept = q.abs().topk(kept_dims(q.shape[2]), dim=2).indices
            partial = torch.zeros_like(q).scatter_(2, kept, q.gather(2, kept))
            return inner(partial, lse, rows, scale, span)

        return scores

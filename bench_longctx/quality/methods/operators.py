"""Score operators: "max" and "sum" are the engine's; "mean-max" is built here, on exact keys.

"mean-max": the mean over the block's positions of the normalised attention, then the largest of the grouped
heads.
"""

from __future__ import annotations

import numpy as np
import torch

from bench_longctx.quality.methods.base import (
    Method,
    RowSelector,
    WrappedSelector,
    as_float,
    best_rows,
    keys_of,
)
from herald.engine.memory import HostStore
from herald.engine.prefill import NO_VOTE, FirstScores
from herald.errors import InvalidOption

OPERATORS = ("max", "sum", "mean-max")
# Rows scored at once.
_PIECE = 2048


def mean_max_scores(keys: np.ndarray, queries: np.ndarray, lse: np.ndarray, scale: float) -> np.ndarray:
    """float32 [L, H, n] of ``keys`` [L, H, n, D]: log of the sum over M positions, largest of the group.

    The division by M, the same for every row, is left out. A query with lse = inf does not count.
    """
    layers, heads = keys.shape[:2]
    count, dim = queries.shape[1], queries.shape[3]
    asked = queries.reshape(layers, count, heads, -1, dim).transpose(0, 2, 3, 1, 4)  # [L, H, G, M, D]
    shift = lse.reshape(layers, count, heads, -1).transpose(0, 2, 3, 1)[:, :, :, None]
    scores = keys[:, :, None] @ asked.swapaxes(3, 4) * np.float32(scale) - shift  # [L, H, G, n, M]
    best = scores.max(axis=4, keepdims=True)
    best = np.where(np.isfinite(best), best, np.float32(0))
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(scores - best).sum(axis=4)) + best[..., 0]
    return total.max(axis=2)


class MeanMaxSelector(WrappedSelector):
    """Selects by `mean_max_scores` of the pool's keys."""

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
        asked = as_float(queries)
        pieces = [
            mean_max_scores(keys_of(self.pool, page_ids, begin, min(begin + _PIECE, last)), asked, lse, scale)
            for begin in range(first, last, _PIECE)
        ]
        return best_rows(np.concatenate(pieces, axis=2), k, first)


class MeanMax(Method):
    """Not a method of its own: the operator, put under any method that leaves scoring to the engine."""

    name = "mean-max"
    about = "mean over positions, max over grouped heads"

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        return MeanMaxSelector(inner, store)

    def first_scores(self, inner: FirstScores) -> FirstScores:
        def scores(
            q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
        ) -> torch.Tensor:
            heads, count, dim = rows.shape[0], q.shape[0], q.shape[2]
            # [H, G, M, D] and [H, G, 1, M]
            asked = q.float().view(count, heads, -1, dim).permute(1, 2, 0, 3)
            shift = lse.view(count, heads, -1).permute(1, 2, 0)[:, :, None]
            shift = shift.masked_fill(shift >= NO_VOTE, float("inf"))
            keys = rows[..., :dim].float()
            pieces = [
                ((keys[:, None, begin : begin + _PIECE] @ asked.mT) * scale - shift).logsumexp(3).amax(1)
                for begin in range(0, rows.shape[1], _PIECE)
            ]
            return torch.cat(pieces, dim=1)

        return scores


def operator_part(operator: str, index_bits: int) -> list[Method]:
    """What is to be attached under a method for ``operator``.

    Raises:
        InvalidOption: an unknown operator, or one that cannot be scored at ``index_bits``.
    """
    if operator not in OPERATORS:
        raise InvalidOption(f"operator={operator!r} is not valid", f"use one of {', '.join(OPERATORS)}")
    if operator != "mean-max":
        return []
    if index_bits != 16:
        raise InvalidOption(
            f"operator='mean-max' with index_bits={index_bits}", "use --index-bits 16: it scores keys"
        )
    return [MeanMax()]

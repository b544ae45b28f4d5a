"""`centre`: HERALD as it was published: one query, that of the block's centre, and 1.75 times the budget.

The query is taken over the draft of the block before, in step 1; the first block's, while the prompt is
prefilled, is that of the middle one of its masked positions.
"""

from __future__ import annotations

import numpy as np
import torch

from bench_longctx.quality.methods.base import Method, RowSelector, Switches, WrappedSelector
from herald.config import OffloadConfig
from herald.engine.memory import HostStore
from herald.engine.prefill import NO_VOTE, FirstScores

BUDGET_FACTOR = 1.75


class CentreQuery(WrappedSelector):
    """Lets the centre position's queries count and no other's (a query whose lse is inf does not)."""

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
        only = np.full_like(lse, np.inf)
        centre = lse.shape[1] // 2
        only[:, centre] = lse[:, centre]
        return self.inner.select(page_ids, first, last, k, queries, only, scale)


class Centre(Method):
    name = "centre"
    about = "the centre position's query, look-ahead in step 1, 1.75 x the budget (as published)"

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return self.options(min(1.0, BUDGET_FACTOR * budget), switches)

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        return CentreQuery(inner, store)

    def first_scores(self, inner: FirstScores) -> FirstScores:
        def scores(
            q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
        ) -> torch.Tensor:
            masked = (lse[:, 0] < NO_VOTE).int()
            rank = masked.cumsum(0) - 1
            centre = (rank == masked.sum() // 2) & masked.bool()
            return inner(q, lse.masked_fill(~centre.unsqueeze(1), NO_VOTE), rows, scale, span)

        return scores

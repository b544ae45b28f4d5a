"""`previous_block`: a block's rows by the queries of the block before it, which are known long before.

The queries are those with which the block before was itself to be selected (all its positions masked). A
request's first block has no predecessor: its own queries choose, and so they do the first time the selector
is asked.
"""

from __future__ import annotations

import numpy as np

from bench_longctx.quality.methods.base import Method, PerRequest, RowSelector, WrappedSelector
from herald.engine.memory import HostStore


class QueriesBefore(WrappedSelector):
    """Scores with the queries of the last call for the same request.

    Attributes:
        fallbacks: calls that had none and used their own.
    """

    def __init__(self, inner: RowSelector, store: HostStore) -> None:
        super().__init__(inner, store)
        self.fallbacks = 0
        self._before: PerRequest[tuple[np.ndarray, np.ndarray]] = PerRequest()

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
        before = self._before.get(page_ids)
        # copies: the engine's buffers are used again
        self._before.set(page_ids, (queries.copy(), lse.copy()))
        if before is None:
            self.fallbacks += 1
            before = queries, lse
        return self.inner.select(page_ids, first, last, k, *before, scale)


class PreviousBlock(Method):
    name = "previous_block"
    about = "all queries of the block before"

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        return QueriesBefore(inner, store)

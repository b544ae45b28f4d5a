"""`window_sinks`: the first positions and the last ones, whatever is asked (StreamingLLM, arXiv 2309.17453).

The whole budget besides the sinks is window.
"""

from __future__ import annotations

import numpy as np
import torch

from bench_longctx.quality.methods.base import Method, RowSelector, WrappedSelector
from herald.engine.memory import HostStore
from herald.engine.prefill import FirstScores


class LastRows(WrappedSelector):
    """Takes the last k positions before the engine's own recent window."""

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
        layout = self.pool.layout
        rows = np.arange(last - k, last, dtype=np.int32)
        return np.tile(rows, (layout.num_layers, layout.num_kv_heads, 1))

    def bytes_scanned(self, first: int, last: int, k: int) -> int:
        return 0


class WindowSinks(Method):
    name = "window_sinks"
    about = "sinks and the most recent rows"
    uses_index = False
    uses_operator = False

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        return LastRows(inner, store)

    def first_scores(self, inner: FirstScores) -> FirstScores:
        def scores(
            q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
        ) -> torch.Tensor:
            positions = torch.arange(rows.shape[1], device=rows.device, dtype=torch.float32)
            return positions.repeat(rows.shape[0], 1)

        return scores

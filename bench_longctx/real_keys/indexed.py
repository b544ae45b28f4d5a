"""The runtime's own path: keys in a host pool, a key index beside it, the selector that the engine runs."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from bench_longctx.real_keys.forward import Captured
from bench_longctx.real_keys.mass import Span
from herald.config import IndexBits, ScoreOperator
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.layout import RowLayout, choose_page_size
from herald.kvstore.native import Backend
from herald.kvstore.pool import HostPool
from herald.select.selector import Selector


class IndexedKeys:
    """A host pool that holds the keys of a text, and an index of each precision.

    Values stay as they are: selection never reads them. Pages lie in a shuffled order.

    Args:
        captured: whose keys.
        block_length: of the blocks that will ask; sets the page size as in the engine.
        dtype: of the pool's rows, bfloat16 as on a GPU.
        num_threads: threads of a selection, 0 for all usable cores.
        backend: what encodes and scans; all give the same sets.
    """

    def __init__(
        self,
        captured: Captured,
        block_length: int,
        dtype: torch.dtype = torch.bfloat16,
        num_threads: int = 0,
        backend: Backend = "auto",
    ) -> None:
        layers, heads, length, dim = captured.keys.shape
        layout = RowLayout(layers, heads, dim, choose_page_size(block_length), dtype)
        self.num_threads, self.backend = num_threads, backend
        self.scale = captured.scale
        pages = layout.pages_for(length)
        self.page_ids = np.random.default_rng(0).permutation(pages).astype(np.int32)
        self.pool = HostPool(layout, pages, pin=False, num_threads=num_threads)
        for number, page in enumerate(self.page_ids.tolist()):
            first = number * layout.page_size
            keys = captured.keys[:, :, first : first + layout.page_size]
            self.pool.rows[:, page, :, : keys.shape[2], :dim] = keys
        self.length = length
        self._indexes: dict[int, KeyIndex] = {}
        self._selectors: dict[tuple[int, str], Selector] = {}

    def select(
        self,
        bits: IndexBits,
        operator: ScoreOperator,
        span: Span,
        k: int,
        queries: torch.Tensor,
        lse: torch.Tensor,
    ) -> torch.Tensor:
        """Positions int64 [L, H, k] of the k best candidates; queries [L, M, Hq, D], lse [L, M, Hq]."""
        selector = self._selector(bits, operator)
        chosen = selector.select(
            *(self.page_ids, span.first, span.last, k, queries.numpy(), lse.numpy(), self.scale)
        )
        return torch.from_numpy(chosen).long()

    def close(self) -> None:
        """End the threads and give the memory back."""
        for selector in self._selectors.values():
            selector.close()
        for index in self._indexes.values():
            index.close()
        self.pool.close()

    def __enter__(self) -> IndexedKeys:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _selector(self, bits: IndexBits, operator: ScoreOperator) -> Selector:
        if bits not in self._indexes:
            index = KeyIndex(self.pool, bits, self.num_threads, self.backend)
            index.append_span(self.page_ids, 0, self.length)
            self._indexes[bits] = index
        if (bits, operator) not in self._selectors:
            self._selectors[bits, operator] = Selector(
                self.pool, self._indexes[bits], operator, self.num_threads, self.backend
            )
        return self._selectors[bits, operator]

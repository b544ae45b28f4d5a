"""The selector: which rows of every layer and KV head a block will attend to."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from herald.config import ScoreOperator, check
from herald.errors import UsageError
from herald.hardware import usable_cores
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.pool import HostPool
from herald.kvstore.row_values import as_numpy
from herald.select import scan, tiles, topk


class Selector:
    """Scores every row of a span for the queries of a block and keeps the best k of each (layer, head).

    Runs (layer, head) tasks over its own threads; the calling thread waits. The result does not depend on the
    number of threads, on which pages hold the rows, or on the instructions used (see `scan` for the formula).

    Args:
        pool: the rows.
        index: its key index; with 16 bits the pool's keys are scanned.
        operator: ``"max"`` of the normalised attention over queries and grouped heads, or ``"sum"``.
        num_threads: threads of a selection, 0 for all usable cores.
        vnni: use AVX-512 VNNI; None where the CPU has it. (The float path gives the same sets.)
    """

    def __init__(
        self,
        pool: HostPool,
        index: KeyIndex,
        operator: ScoreOperator = "max",
        num_threads: int = 0,
        vnni: bool | None = None,
    ) -> None:
        check(operator in ("max", "sum"), "operator", operator, "use 'max' or 'sum'")
        check(num_threads >= 0, "num_threads", num_threads, "use 0 for all cores")
        check(
            not vnni or tiles.HAS_VNNI, "vnni", vnni, "use None: this CPU, or numba's settings, have no VNNI"
        )
        self.pool = pool
        self.index = index
        self.operator = operator
        self.num_threads = num_threads or usable_cores()
        self.vnni = tiles.HAS_VNNI if vnni is None else vnni
        self._executor: ThreadPoolExecutor | None = None
        if self.num_threads > 1:
            self._executor = ThreadPoolExecutor(self.num_threads, thread_name_prefix="herald-select")
        self._local = threading.local()

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
        """The k best positions in ``[first, last)`` for every (layer, head).

        Args:
            page_ids: int32 [np], the request's pages in order of position, from position 0.
            k: rows to keep, at most ``last - first``.
            queries: float32 [L, M, Hq, D], rotary applied.
            lse: float32 [L, M, Hq], natural log-sum-exp of each query's scaled scores over its resident rows.
            scale: the softmax scale.

        Returns:
            int32 [L, H, k], ascending and distinct. Equal scores: the lower position wins.

        Raises:
            UsageError: a shape does not fit, or the span lies outside the pages.
        """
        layout = self.pool.layout
        pages = np.ascontiguousarray(page_ids, dtype=np.int32)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        lse = np.ascontiguousarray(lse, dtype=np.float32)
        self._check(pages, first, last, k, queries, lse)
        out = np.empty((layout.num_layers, layout.num_kv_heads, k), dtype=np.int32)
        if k == last - first:
            out[:] = np.arange(first, last, dtype=np.int32)
            return out
        if k == 0:
            return out
        index = self.index
        rows = as_numpy(self.pool.rows)
        store = scan.Store(rows, index.codes, index.scales, index.means, index.signs, index.bits, index.kind)
        kernel = scan.select_from_rows if index.bits == 16 else scan.select_from_codes
        num_queries = queries.shape[1] * (queries.shape[2] // layout.num_kv_heads)
        use_sum = self.operator == "sum"

        def run(begin: int, end: int) -> None:
            work = self._workspace(num_queries, last - first)
            kernel(
                store, (begin, end), pages, first, last, queries, lse, np.float32(scale), use_sum, work, out
            )

        num_tasks = layout.num_layers * layout.num_kv_heads
        if self._executor is None:
            run(0, num_tasks)
            return out
        # Few enough tasks a job that a slow core does not hold the others up at the end.
        step = max(1, num_tasks // (4 * self.num_threads))
        jobs = [
            self._executor.submit(run, begin, min(begin + step, num_tasks))
            for begin in range(0, num_tasks, step)
        ]
        for job in jobs:
            job.result()
        return out

    def bytes_scanned(self, first: int, last: int, k: int) -> int:
        """Bytes of the index (with 16 bits: of the keys) that a `select` of this span reads."""
        if not 0 < k < last - first:  # nothing, or everything: no row is scored
            return 0
        layout = self.pool.layout
        heads = layout.num_layers * layout.num_kv_heads
        return round((last - first) * heads * self.index.bytes_per_row)

    def close(self) -> None:
        """End the threads. Closing twice is allowed."""
        if self._executor is not None:
            self._executor.shutdown()

    def _check(
        self, pages: np.ndarray, first: int, last: int, k: int, queries: np.ndarray, lse: np.ndarray
    ) -> None:
        layout = self.pool.layout
        limit = len(pages) * layout.page_size
        if not 0 <= first <= last <= limit:
            raise UsageError(f"rows {first} to {last} lie outside the pages", f"use rows 0 to {limit}")
        if not 0 <= k <= last - first:
            raise UsageError(f"k={k} rows cannot be chosen", f"use 0 to {last - first}")
        if pages.size and (pages.min() < 0 or pages.max() >= self.pool.num_pages):
            raise UsageError("page_ids name pages that do not exist", f"use 0 to {self.pool.num_pages - 1}")
        expected = f"[{layout.num_layers}, M, a multiple of {layout.num_kv_heads}, {layout.head_dim}]"
        shape = queries.shape
        fits = queries.ndim == 4 and shape[0] == layout.num_layers and shape[3] == layout.head_dim
        if not fits or shape[1] == 0 or shape[2] == 0 or shape[2] % layout.num_kv_heads:
            raise UsageError(f"queries of shape {shape} do not fit", f"use {expected}")
        if lse.shape != shape[:3]:
            raise UsageError(f"lse of shape {lse.shape} does not fit", f"use {shape[:3]}")

    def _workspace(self, num_queries: int, num_rows: int) -> scan.Workspace:
        """This thread's buffers, kept from call to call while they fit."""
        width = -(-num_queries // 16) * 16
        work = getattr(self._local, "work", None)
        if work is None or work.tile.shape[1] != width or work.scores.size < num_rows:
            work = self._make_workspace(width, num_rows)
            self._local.work = work
        return work

    def _make_workspace(self, width: int, num_rows: int) -> scan.Workspace:
        layout = self.pool.layout
        head_dim, padded = layout.head_dim, self.index.signs.size
        exact = self.index.bits == 16
        use_bytes = self.vnni and not exact
        # The dot kernels work on whole groups of rows; what they read past the last row is never used.
        page_rows = -(-layout.page_size // tiles.TILE_ROWS) * tiles.TILE_ROWS
        group = 4 if use_bytes else 1
        keys, histogram = topk.scratch(num_rows)
        return scan.Workspace(
            row_buffer=np.zeros(
                (page_rows, head_dim if exact else padded), np.uint8 if use_bytes else np.float32
            ),
            packed=np.zeros((padded // group, width, group), np.int8 if use_bytes else np.float32),
            raw=np.zeros((head_dim, width), np.float32),
            correction=np.zeros(width, np.int32),
            query_scale=np.zeros(width, np.float32),
            lse=np.zeros(width, np.float32),
            mean_buffer=np.zeros((scan.PAGE_GROUP, head_dim), np.float32),
            offsets=np.zeros((scan.PAGE_GROUP, width), np.float32),
            tile=np.zeros((page_rows, width), np.float32),
            scores=np.empty(num_rows, np.float32),
            keys=keys,
            histogram=histogram,
        )

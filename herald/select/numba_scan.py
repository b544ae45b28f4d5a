"""Selection by numba: (layer, KV head) tasks over threads, each with its own buffers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from herald.config import ScoreOperator, check
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.pool import HostPool
from herald.kvstore.row_values import as_numpy
from herald.select import scan, tiles, topk

ISAS = ("auto", "vnni", "float")


class NumbaScan:
    """The numba kernels of `scan` over a pool and its index.

    Args:
        executor: threads to run on; None runs on the calling thread.
        num_threads: of the executor.
        isa: ``"vnni"``, ``"float"``, or ``"auto"`` for the first where the CPU has it; the sets are the same.

    Attributes:
        isa: what is used.
    """

    def __init__(
        self,
        pool: HostPool,
        index: KeyIndex,
        operator: ScoreOperator,
        executor: ThreadPoolExecutor | None,
        num_threads: int,
        isa: str = "auto",
    ) -> None:
        check(isa in ISAS, "isa", isa, f"numba has {', '.join(ISAS)}")
        check(
            isa != "vnni" or tiles.HAS_VNNI,
            "isa",
            isa,
            "use 'auto': this CPU, or numba's settings, have no VNNI",
        )
        self.isa = "vnni" if tiles.HAS_VNNI and isa != "float" else "float"
        self._pool = pool
        self._index = index
        self._use_sum = operator == "sum"
        self._executor = executor
        self._num_threads = num_threads
        self._local = threading.local()

    def select(
        self,
        pages: np.ndarray,
        first: int,
        last: int,
        queries: np.ndarray,
        lse: np.ndarray,
        scale: float,
        out: np.ndarray,
    ) -> None:
        """Fill ``out`` int32 [L, H, k]. Arguments as for `Selector.select`, already checked."""
        index = self._index
        rows = as_numpy(self._pool.rows)
        store = scan.Store(rows, *index.arrays, index.signs, index.bits, index.kind)
        kernel = scan.select_from_rows if index.bits == 16 else scan.select_from_codes
        num_queries = queries.shape[1] * (queries.shape[2] // out.shape[1])

        def run(begin: int, end: int) -> None:
            work = self._workspace(num_queries, last - first)
            factor = np.float32(scale)
            kernel(store, (begin, end), pages, first, last, queries, lse, factor, self._use_sum, work, out)

        num_tasks = out.shape[0] * out.shape[1]
        if self._executor is None:
            run(0, num_tasks)
            return
        # Few enough tasks a job that a slow core does not hold the others up at the end.
        step = max(1, num_tasks // (4 * self._num_threads))
        jobs = [
            self._executor.submit(run, begin, min(begin + step, num_tasks))
            for begin in range(0, num_tasks, step)
        ]
        for job in jobs:
            job.result()

    def _workspace(self, num_queries: int, num_rows: int) -> scan.Workspace:
        """This thread's buffers, kept from call to call while they fit."""
        width = -(-num_queries // 16) * 16
        work = getattr(self._local, "work", None)
        if work is None or work.tile.shape[1] != width or work.scores.size < num_rows:
            work = self._make_workspace(width, num_rows)
            self._local.work = work
        return work

    def _make_workspace(self, width: int, num_rows: int) -> scan.Workspace:
        layout = self._pool.layout
        head_dim, padded = layout.head_dim, self._index.signs.size
        exact = self._index.bits == 16
        use_bytes = self.isa == "vnni" and not exact
        # The dot kernels work on whole groups of rows; what they read past the last row is never used.
        page_rows = -(-layout.page_size // tiles.TILE_ROWS) * tiles.TILE_ROWS
        group = 4 if use_bytes else 1
        row_type = np.uint8 if use_bytes else np.float32
        keys, histogram = topk.scratch(num_rows)
        return scan.Workspace(
            row_buffer=np.zeros((page_rows, head_dim if exact else padded), row_type),
            mean_buffer=np.zeros((2 * scan.PAGE_GROUP, padded), row_type),
            rotated=np.zeros((width, padded), np.float32),
            packed=np.zeros((padded // group, width, group), np.int8 if use_bytes else np.float32),
            raw=np.zeros((head_dim, width), np.float32),
            lse=np.zeros(width, np.float32),
            excess=np.zeros(width, np.int32),
            mean_dots=np.zeros((2 * scan.PAGE_GROUP, width), np.float32),
            shifts=np.zeros((scan.PAGE_GROUP, width), np.float32),
            starts=np.zeros(width, np.int32),
            best=np.zeros((page_rows, tiles.LANES), np.int32),
            largest=np.zeros(page_rows, np.int32),
            tile=np.zeros((page_rows, width), np.float32),
            scores=np.empty(num_rows, np.float32),
            keys=keys,
            histogram=histogram,
        )

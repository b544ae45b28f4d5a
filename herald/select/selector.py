"""The selector: which rows of every layer and KV head a block will attend to, and what that changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from herald.config import ScoreOperator, check
from herald.errors import UsageError
from herald.hardware import usable_cores
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.native import Backend, find_native, native_for
from herald.kvstore.pool import HostPool
from herald.select.device_scan import DeviceScan, ScanJob
from herald.select.numba_scan import NumbaScan
from herald.select.update import Plan, SlotGeometry, UpdateRequest, plan_with_native, plan_with_numba


class Selector:
    """Scores every row of a span for the queries of a block and keeps the best k of each (layer, head).

    Runs (layer, head) tasks over threads; the calling thread waits. The result does not depend on the number
    of threads, on which pages hold the rows, or on the backend and its instructions. The formula is `scan`'s.

    Args:
        pool: the rows.
        index: its key index; with 16 bits the pool's keys are scanned.
        operator: ``"max"`` of the normalised attention over queries and grouped heads, or ``"sum"``.
        num_threads: threads of a selection, 0 for all usable cores.
        backend: ``"native"`` for the C++ extension, ``"numba"``, or ``"auto"`` for the faster one that can be
            used. The extension scans codes with the operator "max"; all else is numba's.
        isa: instruction set: ``"auto"``, or for native one of ``herald._native.scan_isas()``, for numba
            ``"vnni"`` or ``"float"``.
        device: scores a share of the layers, where it can (`DeviceScan`); None for the CPU alone.
        device_bytes: of its memory, for layers of the index that need not cross the bus.

    Attributes:
        backend: ``"native"`` or ``"numba"``, what scans.
        isa: the instruction set it uses.
        reason: why nothing better scans, or "".
        device_scan: who scores layers on the device, or None.

    Raises:
        UsageError: ``backend="native"`` cannot be used, or this CPU lacks the instruction set.
        ResidentSetTooSmall: the device has not ``device_bytes``.
    """

    def __init__(
        self,
        pool: HostPool,
        index: KeyIndex,
        operator: ScoreOperator = "max",
        num_threads: int = 0,
        backend: Backend = "auto",
        isa: str = "auto",
        device: torch.device | None = None,
        device_bytes: int = 0,
    ) -> None:
        check(operator in ("max", "sum"), "operator", operator, "use 'max' or 'sum'")
        check(num_threads >= 0, "num_threads", num_threads, "use 0 for all cores")
        self.pool = pool
        self.index = index
        self.operator = operator
        self.num_threads = num_threads or usable_cores()
        self._native = native_for(backend)
        scanned_by_numba = _scanned_by_numba(operator, index.bits)
        if backend == "native" and scanned_by_numba:
            raise UsageError(f"backend='native' cannot be used: {scanned_by_numba}", "use backend='auto'")
        if backend == "auto" and self._native is not None and self._native.scan_isa() == "scalar":
            scanned_by_numba = scanned_by_numba or "the extension has no vector instructions of this CPU"
        self._executor: ThreadPoolExecutor | None = None
        self._planners: ThreadPoolExecutor | None = None  # their own, so that a plan does not wait for a scan
        self._numba: NumbaScan | None = None
        self.device_scan: DeviceScan | None = None
        self._device_reason = ""
        if self._native is None or scanned_by_numba:
            if self.num_threads > 1:
                self._executor = ThreadPoolExecutor(self.num_threads, thread_name_prefix="herald-select")
                self._planners = ThreadPoolExecutor(self.num_threads, thread_name_prefix="herald-plan")
            self._numba = NumbaScan(pool, index, operator, self._executor, self.num_threads, isa)
            self.backend, self.isa = "numba", self._numba.isa
            self.reason = scanned_by_numba or ("" if backend == "numba" else find_native().reason)
            self._device_reason = "the extension does not scan here" if device is not None else ""
            return
        try:
            self.backend, self.isa = "native", self._native.scan_isa(isa)
        except ValueError as error:
            problem, _, remedy = str(error).rpartition("; ")
            raise UsageError(problem, remedy) from None
        self.reason = next((f"{name}: {why}" for name, why in self._native.scan_isas().items() if why), "")
        if device is not None:
            self._device_reason = _kept_from_device(index, device)
            if not self._device_reason:
                self.device_scan = DeviceScan(
                    self._native, index, device, self.isa, device_bytes=device_bytes
                )

    @property
    def device_reason(self) -> str:
        """Why the device that was given scores nothing (any more), or ""."""
        return self._device_reason or ("" if self.device_scan is None else self.device_scan.reason)

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
            queries: float32 [L, M, Hq, D], or the bits of bfloat16 as uint16; rotary applied.
            lse: float32 [L, M, Hq], natural log-sum-exp of each query's scaled scores over its resident rows;
                inf for a query that must not count.
            scale: the softmax scale.

        Returns:
            int32 [L, H, k], ascending and distinct. Equal scores: the lower position wins.

        Raises:
            UsageError: a shape does not fit, or the span lies outside the pages.
        """
        layout = self.pool.layout
        pages = np.ascontiguousarray(page_ids, dtype=np.int32)
        dtype = np.uint16 if queries.dtype == np.uint16 else np.float32
        queries = np.ascontiguousarray(queries, dtype=dtype)
        lse = np.ascontiguousarray(lse, dtype=np.float32)
        self._check(pages, first, last, k, queries, lse)
        out = np.empty((layout.num_layers, layout.num_kv_heads, k), dtype=np.int32)
        if k == last - first:
            out[:] = np.arange(first, last, dtype=np.int32)
        elif k > 0 and self._numba is not None:
            self._numba.select(pages, first, last, queries, lse, scale, out)
        elif k > 0:
            self._select_native(ScanJob(pages, first, last, queries, lse, scale, out))
        return out

    def _select_native(self, job: ScanJob) -> None:
        """The C++ kernels, and the device beside them."""
        assert self._native is not None
        index, claims, share = self.index, None, None
        scan = self.device_scan
        if scan is not None and scan.pays(job.page_ids, job.first, job.last):
            claims = self._native.Claims(job.out.shape[0] * job.out.shape[1])
            share = scan.start(job, claims)
            if scan.holds_index:
                share.wait()
                if share.layers == job.out.shape[0]:
                    return
        try:
            self._native.select(
                *(*index.arrays, index.signs, index.bits),
                *(job.page_ids, job.first, job.last, job.queries, job.lse, job.scale, job.out),
                *(self.num_threads, self.isa, claims),
            )
        finally:
            if share is not None:
                share.wait()

    def plan_update(
        self,
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
        """What makes sinks, selection and recent window resident, as rows to copy.

        The target of every (layer, head) is ``[0, first)``, ``selected`` and ``[last, upto)``. Slots that
        hold one of its rows keep it. The others, ascending, and after them slots ``length``, ``length + 1``
        ... are handed out: first to the rows that arrive, by position, then to positions
        ``upto .. upto + own_rows``.

        Args:
            slot_positions: int32 [L, H, S], position of the row in each slot; of ``[0, length)`` only. A
                position that occurs twice is kept once, a negative one counts as an empty slot.
            selected: int32 [L, H, k], ascending within ``[first, last)``.
            page_ids: int32 [np], the request's pages in order of position.
            own_rows: slots to keep for the rows of a finished block; 0 for none.
            move_all: rows that stay travel too, each into its own slot, if they lie below ``last`` (those of
                the recent window may not be in the pool yet).
            geometry: where slots and staging rows lie in the arena.

        Raises:
            ResidentSetTooSmall: target and own rows exceed the S slots, or more rows arrive than there are
                staging rows.
            UsageError: shapes or positions do not fit; or there are fewer rows than ``length``, which would
                leave holes.
        """
        request = UpdateRequest(
            np.ascontiguousarray(slot_positions, dtype=np.int32),
            length,
            np.ascontiguousarray(selected, dtype=np.int32),
            first,
            last,
            upto,
            np.ascontiguousarray(page_ids, dtype=np.int32),
            own_rows,
            move_all,
            geometry,
        )
        if self._native is not None:
            return plan_with_native(self._native, request, self.pool, self.num_threads)
        return plan_with_numba(request, self.pool, self._planners, self.num_threads)

    def bytes_scanned(self, first: int, last: int, k: int) -> int:
        """Bytes of the index (with 16 bits: of the keys) that a `select` of this span reads."""
        if not 0 < k < last - first:  # nothing, or everything: no row is scored
            return 0
        layout = self.pool.layout
        heads = layout.num_layers * layout.num_kv_heads
        return round((last - first) * heads * self.index.bytes_per_row)

    def close(self) -> None:
        """End the threads. Closing twice is allowed."""
        if self.device_scan is not None:
            self.device_scan.close()
        for threads in (self._executor, self._planners):
            if threads is not None:
                threads.shutdown()

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


def _kept_from_device(index: KeyIndex, device: torch.device) -> str:
    """Why the device cannot score a share, or ""."""
    if index.bits not in (8, 4):
        return f"the device scores codes of 8 and 4 bits, and the index has {index.bits}"
    if device.type == "cuda" and not index.pinned:
        return f"the key index is not page-locked: {index.pin_reason}"
    return ""


def _scanned_by_numba(operator: ScoreOperator, bits: int) -> str:
    """Why the extension does not scan, or ""."""
    if bits == 16:
        return "index_bits=16 is scanned by numba: reading the keys bounds it, not the instructions"
    return "score_operator='sum' is scanned by numba" if operator == "sum" else ""

"""Scans a share of a selection on the device: the index crosses the bus, order keys come back.

The bus that carries a few percent of the KV rows is idle most of the time, and the cores are what selection
is short of. So while the CPU's threads take the (layer, head) tasks of a selection from the front, this takes
whole layers from the back, copies their codes to the device piece by piece, scores them there with the CPU's
integers, bit for bit, and brings one int32 a row back, from which the CPU takes the top k. Which side took a
task cannot be seen in the result.

A layer is a dozen calls of the driver and a few hundred microseconds of the bus, so all of that is driven by
the extension without the interpreter (csrc/device_share.cpp). Here are the memory, and the graphs that score.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from herald.kvstore.host_memory import REGISTER_BYTES
from herald.kvstore.key_index import KeyIndex
from herald.select.driver import CudaDriver, Driver, HostDriver
from herald.select.worker import BackgroundWorker
from herald_kernels import score_codes

# Codes on the device at once: pieces of one layer's codes, one being copied while another is scored.
PIECE_BYTES = 32 << 20
PIECES = 3
# Layers of which the device has begun but not brought back the keys.
LAYERS_UNDER_WAY = 4
# Layers that must be left to the CPU when another one is taken: it would be done with them first.
LAYERS_LEFT = 2
# A selection of fewer token-heads takes the CPU about 2 ms.
LEAST = 1 << 20
# Ranges of pages that lie in one piece of memory; a request with more of them is scanned by the CPU alone.
MAX_RUNS = 64
# int32 of a span: first page, pages, rows of a head's keys, and one for alignment.
SPAN = 4


@dataclass(frozen=True)
class ScanJob:
    """A selection as the native kernels take it.

    Attributes:
        queries: float32 or uint16 [L, M, Hq, D]. lse: float32 [L, M, Hq].
        page_ids: int32, the request's pages, of which positions ``[first, last)`` are scanned.
        out: int32 [L, H, k], a layer of it is written by whoever took that layer's tasks.
    """

    page_ids: np.ndarray
    first: int
    last: int
    queries: np.ndarray
    lse: np.ndarray
    scale: float
    out: np.ndarray


class Share:
    """What the device takes of a selection.

    Attributes:
        layers: how many it took; known once `wait` has returned.
    """

    def __init__(self, taken: Future[int]) -> None:
        self.layers = 0
        self._taken = taken

    def wait(self) -> None:
        """Wait until the rows of all of them are written; raises what went wrong."""
        self.layers = self._taken.result()


class DeviceScan:
    """Takes layers of selections from the CPU, on a thread of its own.

    Args:
        native: ``herald._native``.
        index: 8 or 4 bits, page-locked if ``device`` is a CUDA device.
        device: where codes are scored. On a CPU everything happens in turn (tests).
        isa: instruction set of the top k.
        least: token-heads of a selection that are worth a layer's way there and back.

    Attributes:
        layers: layers taken so far.
    """

    def __init__(
        self, native: Any, index: KeyIndex, device: torch.device, isa: str, least: int = LEAST
    ) -> None:
        self._native = native
        self._index = index
        self._isa = isa
        self._least = least
        self.layers = 0
        self._worker = BackgroundWorker("herald-device-scan")
        self._memory: _DeviceMemory | None = _DeviceMemory(native, index, device)

    def start(self, job: ScanJob, claims: Any) -> Share:
        """Take layers of a selection in the background, for as long as ``claims`` has some."""
        return Share(self._worker.submit(self._run, job, claims, LAYERS_LEFT))

    def pays(self, page_ids: np.ndarray, first: int, last: int) -> bool:
        """Whether the span is long enough, and its pages lie in few enough ranges to be copied one by one."""
        layers, _, heads = self._index.codes.shape[:3]
        if layers * heads * (last - first) < self._least:
            return False
        return int(np.count_nonzero(np.diff(page_ids) != 1)) < MAX_RUNS

    def warm_up(self, positions: int = 32, group: int = 4) -> None:
        """Compile the kernels for a block of ``positions`` and ``group`` query heads a KV head. Waits."""
        layers, _, heads, size, _ = self._index.codes.shape
        queries = np.zeros((layers, positions, heads * group, self._index.pool.layout.head_dim), np.float32)
        out = np.zeros((layers, heads, 1), np.int32)
        job = ScanJob(np.zeros(1, np.int32), 0, size, queries, queries[..., 0].copy(), 1.0, out)
        Share(self._worker.submit(self._run, job, self._native.Claims(heads), 0)).wait()

    def close(self) -> None:
        """Let the selections under way end, give the device's memory back and the index up. Idempotent."""
        self._worker.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _run(self, job: ScanJob, claims: Any, layers_left: int) -> int:
        """How many layers were taken; all of them are written."""
        assert self._memory is not None
        size, heads = self._index.codes.shape[3], self._index.codes.shape[2]
        width = self._native.query_width(job.queries.shape[1], job.queries.shape[2] // heads)
        buffers = self._memory.buffers(width, -(-job.last // size) - job.first // size)
        taken = buffers.share.run(
            *(*self._index.arrays, self._index.signs, self._index.bits),
            *(job.page_ids, job.first, job.last, job.queries, job.lse, job.scale, job.out),
            *(self._isa, claims, layers_left * heads),
        )
        self.layers += taken
        return int(taken)


class _DeviceMemory:
    """Pieces of codes, and for every number of query rows what is beside them.

    Memory is the scan's streams' own from its first use on: what other streams have freed may still be in use
    by work that is queued there.
    """

    def __init__(self, native: Any, index: KeyIndex, device: torch.device) -> None:
        self.native = native
        self.index = index
        self.device = device
        self.driver: Driver = CudaDriver(device) if device.type == "cuda" else HostDriver()
        self.copy_stream = self.driver.stream()
        self.scan_stream = self.driver.stream()
        page_bytes = index.codes[0, 0].nbytes
        self.piece_pages = max(1, min(PIECE_BYTES // page_bytes, index.codes.shape[1]))
        self.codes: list[torch.Tensor] = []
        self._by_width: dict[int, _Buffers] = {}

    def buffers(self, width: int, num_pages: int) -> _Buffers:
        """Buffers for ``width`` query rows a KV head and a request of ``num_pages``; made where missing."""
        held = self._by_width.get(width)
        if held is None or held.capacity < num_pages:
            capacity = min(1 << (num_pages - 1).bit_length(), self.index.codes.shape[1])
            if held is not None:
                self._by_width.pop(width).close()
            if not self.codes:
                shape = (self.piece_pages, *self.index.codes.shape[2:])
                self.codes = [self.on_device(torch.uint8, *shape) for _ in range(PIECES)]
            held = self._by_width[width] = _Buffers(self, width, capacity)
        return held

    def on_device(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        with self.driver.on(self.copy_stream):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def on_host(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.driver.pinned)

    def close(self) -> None:
        for buffers in self._by_width.values():
            buffers.close()
        self._by_width.clear()
        self.codes.clear()


class _Buffers:
    """What scores layers with ``width`` query rows a KV head of requests up to ``capacity`` pages."""

    def __init__(self, memory: _DeviceMemory, width: int, capacity: int) -> None:
        self.capacity = capacity
        self._driver = memory.driver
        index, bits = memory.index, memory.index.bits
        heads, size = index.codes.shape[2:4]
        n = index.mean_codes.shape[4]
        sizes = (heads * width * n, 4 * heads * width, 4 * heads)
        kind = torch.int32 if bits == 8 else torch.float32
        spans = -(-capacity // memory.piece_pages)
        starts = memory.on_device(kind, heads, memory.piece_pages, width)
        piece_spans = [memory.on_device(torch.int32, SPAN) for _ in range(PIECES)]
        self._events: list[int] = []
        self._graphs: list[int] = []
        # kept alive for as long as the graphs and the extension know their addresses
        self._tensors: list[torch.Tensor] = [starts, *memory.codes, *piece_spans]
        layers, scored_with = [], []
        for _ in range(LAYERS_UNDER_WAY):
            host_queries = memory.on_host(torch.uint8, sum(sizes))
            queries = memory.on_device(torch.uint8, sum(sizes))
            host_spans = memory.on_host(torch.int32, spans, SPAN)
            means = memory.on_device(torch.int8, capacity, heads, 2, n)
            scales = memory.on_device(torch.float32, capacity, heads, 2)
            row_scales = memory.on_device(torch.float32, capacity, heads, size if bits < 8 else 0)
            keys = memory.on_device(torch.int32, heads * capacity * size)
            host_keys = memory.on_host(torch.int32, heads * capacity * size)
            used = (host_queries, queries, host_spans, means, scales, row_scales, keys, host_keys)
            self._tensors += used
            layers.append([*(tensor.data_ptr() for tensor in used), self._event(blocking=True)])
            codes, lead, reach = queries.split(sizes)
            asked = (
                codes.view(torch.int8).view(heads, width, n),
                lead.view(torch.float32).view(heads, width),
                reach.view(torch.float32),
            )
            scored_with.append(((None if bits == 8 else row_scales, means, scales), asked, keys))
        pieces = []
        for codes, span in zip(memory.codes, piece_spans, strict=True):
            pieces.append([codes.data_ptr(), span.data_ptr(), self._event(), self._event()])
            for index_arrays, asked, keys in scored_with:
                arguments = (codes, *index_arrays, *asked, span[:3], starts, keys)
                self._graphs.append(self._capture(memory, arguments))
        stream = self._driver.handle
        self.share = memory.native.DeviceShare(
            self._driver.calls,
            self._driver.context,
            *(stream(memory.copy_stream), stream(memory.scan_stream)),
            *(memory.piece_pages, capacity, width, REGISTER_BYTES),
            *(layers, pieces, self._graphs),
        )

    def _capture(self, memory: _DeviceMemory, arguments: tuple[Any, ...]) -> int:
        """A graph of `score_codes`. Its memory is zero: a first run, which compiles, scores no page."""
        if not self._graphs:
            with self._driver.on(memory.copy_stream):
                score_codes(*arguments)
        return self._driver.capture(memory.copy_stream, lambda: score_codes(*arguments))

    def _event(self, blocking: bool = False) -> int:
        self._events.append(self._driver.event(blocking))
        return self._events[-1]

    def close(self) -> None:
        self._driver.release(self._graphs, self._events)
        self._graphs, self._events = [], []
        self._tensors.clear()

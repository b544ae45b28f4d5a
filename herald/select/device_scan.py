"""Scans a share of a selection on the device: the index crosses the bus, order keys come back.

The bus that carries a few percent of the KV rows is idle most of the time, and the cores are what selection
is short of. So while the CPU's threads take the (layer, head) tasks of a selection from the front, this takes
whole layers from the back, copies their codes to the device piece by piece, scores them there with the CPU's
integers, bit for bit, and brings one int32 a row back, from which the CPU takes the top k. Which side took a
task cannot be seen in the result.

A layer is a dozen calls of the driver and a few hundred microseconds of the bus, so all of that is driven by
the extension without the interpreter (csrc/device_share.cpp). Here are the memory, and the graphs that score.

Where the user gives device memory for it, the last layers of the index, or all, stay on the device: of each
request's pages only what was written since its last selection crosses the bus.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from herald.cuda_driver import CudaDriver, Driver, HostDriver
from herald.errors import ResidentSetTooSmall
from herald.kvstore.host_memory import REGISTER_BYTES
from herald.kvstore.key_index import KeyIndex
from herald.select.worker import BackgroundWorker
from herald_kernels import score_codes

# Codes on the device at once: pieces of one layer's codes, one being copied while another is scored.
PIECE_BYTES = 32 << 20
PIECES = 3
# Layers of which the device has begun but not brought back the keys: those whose codes cross the bus, and
# all.
LAYERS_AHEAD = 4
LAYERS_UNDER_WAY = 6
# Layers that must be left to the CPU when another one is taken: it would be done with them first.
LAYERS_LEFT = 2
# A selection of fewer token-heads takes the CPU about 2 ms.
LEAST = 1 << 20
# Ranges of pages that lie in one piece of memory; a request with more of them is scanned by the CPU alone.
MAX_RUNS = 64
# int32 of a span, see `score_codes`.
SPAN = 4

logger = logging.getLogger(__name__)


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

    Where the device has no room for the buffers of a selection, the CPU does all of this one and of those to
    come (`reason`).

    Args:
        native: ``herald._native``.
        index: 8 or 4 bits, page-locked if ``device`` is a CUDA device.
        device: where codes are scored. On a CPU everything happens in turn (tests).
        isa: instruction set of the top k.
        least: token-heads of a selection that are worth a layer's way there and back.
        device_bytes: of the device's memory, for layers of the index that stay there.

    Attributes:
        layers: layers taken so far.
        reason: why it takes none any more, or "".
        layers_held: layers of the index that stay on the device.
        holds_index: whether that is all of them: then selections leave nothing to the CPU.

    Raises:
        ResidentSetTooSmall: the device has not as much memory.
    """

    def __init__(
        self,
        native: Any,
        index: KeyIndex,
        device: torch.device,
        isa: str,
        least: int = LEAST,
        device_bytes: int = 0,
    ) -> None:
        self._native = native
        self._index = index
        self._isa = isa
        self._least = least
        self.layers = 0
        self.reason = ""
        num_layers = index.codes.shape[0]
        self.layers_held = min(num_layers, device_bytes * num_layers // index.num_bytes)
        self.holds_index = self.layers_held == num_layers
        if device_bytes and not self.layers_held:
            least_bytes = -(-index.num_bytes // num_layers)
            logger.warning("no layer of the key index stays on the device: one takes %d bytes", least_bytes)
        self._device = device
        self._memory: _DeviceMemory | None = self._take_memory()
        self._worker = BackgroundWorker("herald-device-scan")

    def start(self, job: ScanJob, claims: Any) -> Share:
        """Take layers of a selection in the background, for as long as ``claims`` has some."""
        return Share(self._worker.submit(self._run, job, claims, 0 if self.holds_index else LAYERS_LEFT))

    def pays(self, page_ids: np.ndarray, first: int, last: int) -> bool:
        """Whether the span is long enough, and its pages lie in few enough ranges to be copied one by one."""
        if self.reason:
            return False
        layers, _, heads = self._index.codes.shape[:3]
        if layers * heads * (last - first) < self._least:
            return False
        if self.holds_index:
            return True
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
        self._drop_memory()

    def let_go(self) -> None:
        """Give the device's memory back until the next selection, which takes it anew.

        Raises:
            UsageError: it is closed.
        """
        self._worker.submit(self._drop_memory).result()

    def _take_memory(self) -> _DeviceMemory:
        return _DeviceMemory(self._native, self._index, self._device, self.layers_held)

    def _drop_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self.reason = ""

    def _run(self, job: ScanJob, claims: Any, layers_left: int) -> int:
        """How many layers were taken; all of them are written."""
        if self.reason:
            return 0
        if self._memory is None:
            self._memory = self._take_memory()
        size, heads = self._index.codes.shape[3], self._index.codes.shape[2]
        width = self._native.query_width(job.queries.shape[1], job.queries.shape[2] // heads)
        try:
            buffers = self._memory.buffers(width, -(-job.last // size) - job.first // size)
        except torch.OutOfMemoryError as error:
            self._drop_memory()
            self.reason = f"the device has no room for what scoring takes beside the index: {error}"
            logger.warning("the CPU alone selects from now on: %s", self.reason)
            return 0
        taken = buffers.share.run(
            *(*self._index.arrays, self._index.signs, self._index.bits),
            *(job.page_ids, job.first, job.last, job.queries, job.lse, job.scale, job.out),
            *(self._isa, claims, layers_left * heads),
        )
        self.layers += taken
        return int(taken)


class _DeviceMemory:
    """What is on the device: pieces of codes, layers of the index, and buffers by the number of query rows.

    Memory is the scan's streams' own from its first use on: what other streams have freed may still be in use
    by work that is queued there.

    Attributes:
        held: codes, row_scales, mean_codes, page_scales of the layers that stay, [layers, pages, ..].
        held_versions: int64 [pages], `KeyIndex.versions` of what they hold; -1 for nothing.
    """

    def __init__(self, native: Any, index: KeyIndex, device: torch.device, layers_held: int) -> None:
        self.native = native
        self.index = index
        self.device = device
        self.driver: Driver = CudaDriver(device) if device.type == "cuda" else HostDriver()
        self.copy_stream = self.driver.stream()
        self.scan_stream = self.driver.stream()
        page_bytes = index.codes[0, 0].nbytes
        self.piece_pages = max(1, min(PIECE_BYTES // page_bytes, index.codes.shape[1]))
        self.codes: list[torch.Tensor] = []
        self.first_held = index.codes.shape[0] - layers_held
        self.held_versions = np.full_like(index.versions, -1)
        try:
            self.held = [
                self.on_device(torch.from_numpy(array).dtype, layers_held, *array.shape[1:])
                for array in index.arrays
            ]
        except torch.OutOfMemoryError:
            wanted = index.num_bytes // index.codes.shape[0] * layers_held
            raise ResidentSetTooSmall(
                f"the device has no room for {layers_held} layers of the key index ({wanted:,} bytes)",
                "use less index_device_bytes, or 4 index_bits",
            ) from None
        self._by_width: dict[int, _Buffers] = {}

    def buffers(self, width: int, num_pages: int) -> _Buffers:
        """Buffers for ``width`` query rows a KV head and a request of ``num_pages``; made where missing."""
        held = self._by_width.get(width)
        if held is None or held.capacity < num_pages:
            capacity = min(1 << (num_pages - 1).bit_length(), self.index.codes.shape[1])
            if held is not None:
                self._by_width.pop(width).close()
            if not self.codes and self.first_held:
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
        self.held.clear()


class _Buffers:
    """What scores layers with ``width`` query rows a KV head of requests up to ``capacity`` pages."""

    def __init__(self, memory: _DeviceMemory, width: int, capacity: int) -> None:
        self.capacity = capacity
        self._memory = memory
        self._driver = memory.driver
        self._width = width
        self._events: list[int] = []
        self._graphs: list[int] = []
        # kept alive for as long as the graphs and the extension know their addresses
        self._tensors: list[torch.Tensor] = []
        try:
            self.share = self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> Any:
        """``herald._native.DeviceShare`` with its buffers, events and graphs."""
        memory, index, width, capacity = self._memory, self._memory.index, self._width, self.capacity
        num_layers, _, heads = index.codes.shape[:3]
        kind = torch.int32 if index.bits == 8 else torch.float32
        holds = memory.first_held < num_layers
        starts = self._on_device(kind, heads, memory.piece_pages if memory.codes else 0, width)
        table_starts = self._on_device(kind, heads, capacity if holds else 0, width)
        host_table, table = self._on_host(torch.int32, capacity), self._on_device(torch.int32, capacity)
        layers: list[list[int]] = []
        scored_with = []
        for _ in range(LAYERS_UNDER_WAY):
            addresses, of_index, asked, span, keys = self._layer()
            graph = 0
            if holds:
                held = [array.flatten(0, 1) for array in memory.held]
                held_codes = (held[0], None if index.bits == 8 else held[1], held[2], held[3])
                graph = self._capture((*held_codes, *asked, span, table_starts, keys, table))
            layers.append([*addresses, graph])
            scored_with.append((of_index, asked, keys))
        pieces, graphs = [], []
        for codes in memory.codes:
            span = self._on_device(torch.int32, SPAN)
            pieces.append([codes.data_ptr(), span.data_ptr(), self._event(), self._event()])
            for of_index, asked, keys in scored_with:
                graphs.append(self._capture((codes, *of_index, *asked, span, starts, keys)))
        stream = self._driver.handle
        return memory.native.DeviceShare(
            self._driver.calls,
            [self._driver.context, stream(memory.copy_stream), stream(memory.scan_stream)],
            [memory.piece_pages, capacity, width, REGISTER_BYTES, LAYERS_AHEAD, memory.first_held],
            *(layers, pieces, graphs),
            [memory.held[i].data_ptr() for i in range(4)] + [host_table.data_ptr(), table.data_ptr()],
            *(index.versions, memory.held_versions),
        )

    def close(self) -> None:
        self._driver.release(self._graphs, self._events)
        self._graphs, self._events = [], []
        self._tensors.clear()

    def _layer(self) -> tuple[list[int], tuple[Any, ...], tuple[Any, ...], torch.Tensor, torch.Tensor]:
        """Memory of a layer under way.

        Returns:
            Addresses in the order of LayerBuffers (csrc/device_share.h) without its graph; row scales, means
            and page scales of a request; query codes, lead and reach; the span; the keys.
        """
        index, capacity, width = self._memory.index, self.capacity, self._width
        heads, size = index.codes.shape[2:4]
        n = index.mean_codes.shape[4]
        sizes = (heads * width * n, 4 * heads * width, 4 * heads, 4 * SPAN)
        host_queries = self._on_host(torch.uint8, sum(sizes))
        queries = self._on_device(torch.uint8, sum(sizes))
        crossing = capacity if self._memory.first_held else 0  # pages of which anything has to come each time
        host_spans = self._on_host(torch.int32, -(-crossing // self._memory.piece_pages), SPAN)
        means = self._on_device(torch.int8, crossing, heads, 2, n)
        scales = self._on_device(torch.float32, crossing, heads, 2)
        row_scales = self._on_device(torch.float32, crossing, heads, size if index.bits < 8 else 0)
        keys = self._on_device(torch.int32, heads * capacity * size)
        host_keys = self._on_host(torch.int32, heads * capacity * size)
        used = (host_queries, queries, host_spans, means, scales, row_scales, keys, host_keys)
        codes, lead, reach, span = queries.split(sizes)
        asked = (
            codes.view(torch.int8).view(heads, width, n),
            lead.view(torch.float32).view(heads, width),
            reach.view(torch.float32),
        )
        addresses = [*(tensor.data_ptr() for tensor in used), self._event(), self._event(blocking=True)]
        of_index = (None if index.bits == 8 else row_scales, means, scales)
        return addresses, of_index, asked, span.view(torch.int32), keys

    def _capture(self, arguments: tuple[Any, ...]) -> int:
        """A graph of `score_codes`. Its memory is zero: a first run, which compiles, scores no page."""
        with self._driver.on(self._memory.copy_stream):
            score_codes(*arguments)
        self._graphs.append(self._driver.capture(lambda: score_codes(*arguments)))
        return self._graphs[-1]

    def _event(self, blocking: bool = False) -> int:
        self._events.append(self._driver.event(blocking))
        return self._events[-1]

    def _on_device(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        self._tensors.append(self._memory.on_device(dtype, *shape))
        return self._tensors[-1]

    def _on_host(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        self._tensors.append(self._memory.on_host(dtype, *shape))
        return self._tensors[-1]

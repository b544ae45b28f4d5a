"""Scans a share of a selection on the device: the index crosses the bus, order keys come back.

The bus that carries a few percent of the KV rows is idle most of the time, and the cores are what selection
is short of. So while the CPU's threads take the (layer, head) tasks of a selection from the front, this takes
whole layers from the back, copies their codes to the device piece by piece, scores them there with the CPU's
integers, bit for bit, and brings one int32 a row back, from which the CPU takes the top k. Which side took a
task cannot be seen in the result.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from herald.kvstore.host_memory import REGISTER_BYTES
from herald.kvstore.key_index import KeyIndex
from herald.select.worker import BackgroundWorker
from herald_kernels import score_codes

# Codes on the device at once: pieces of one layer's codes, one being copied while another is scored.
PIECE_BYTES = 32 << 20
PIECES = 3
# Layers of which the device has begun but not brought back the keys.
LAYERS_UNDER_WAY = 3
# Layers that must be left to the CPU when another one is taken: it would be done with them first.
LAYERS_LEFT = 2
# A selection of fewer token-heads takes the CPU about 2 ms.
LEAST = 1 << 20
# Ranges of pages that lie in one piece of memory; a request with more of them is scanned by the CPU alone.
MAX_RUNS = 64


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

    def __init__(self) -> None:
        self.layers = 0
        self._taken: Future[None] | None = None
        self._written: list[Future[None]] = []

    def wait(self) -> None:
        """Wait until the rows of all of them are written; raises what went wrong."""
        assert self._taken is not None
        self._taken.result()
        for written in self._written:
            written.result()


class DeviceScan:
    """Takes layers of selections from the CPU.

    One thread copies and scores, another takes the top k of the keys that come back.

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
        self._device = device
        self._isa = isa
        self._least = least
        self.layers = 0
        self._scanner = BackgroundWorker("herald-device-scan")
        self._chooser = BackgroundWorker("herald-device-top-k")
        self._room = threading.Semaphore(LAYERS_UNDER_WAY)
        self._codes = torch.from_numpy(index.codes)
        self._row_scales = torch.from_numpy(index.row_scales)
        self._means = torch.from_numpy(index.mean_codes)
        self._scales = torch.from_numpy(index.page_scales)
        page_bytes = self._codes[0, 0].numel()
        self._piece_pages = max(1, PIECE_BYTES // page_bytes)
        self._cuda = device.type == "cuda"
        self._copy_stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._scan_stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._pieces: deque[tuple[torch.Tensor, Any]] = deque()
        self._buffers: dict[str, torch.Tensor] = {}
        self._turn = 0

    def start(self, job: ScanJob, claims: Any) -> Share:
        """Take layers of a selection in the background, for as long as ``claims`` has some."""
        share = Share()
        share._taken = self._scanner.submit(self._run, job, claims, share, LAYERS_LEFT)
        return share

    def pays(self, page_ids: np.ndarray, first: int, last: int) -> bool:
        """Whether the span is long enough, and its pages lie in few enough ranges to be copied one by one."""
        layers, _, heads = self._codes.shape[:3]
        if layers * heads * (last - first) < self._least:
            return False
        return int(np.count_nonzero(np.diff(page_ids) != 1)) < MAX_RUNS

    def warm_up(self, positions: int = 32, group: int = 4) -> None:
        """Compile the kernels for a block of ``positions`` and ``group`` query heads a KV head. Waits."""
        layers, _, heads, size, _ = self._codes.shape
        queries = np.zeros((layers, positions, heads * group, self._index.pool.layout.head_dim), np.float32)
        out = np.zeros((layers, heads, 1), np.int32)
        job = ScanJob(np.zeros(1, np.int32), 0, size, queries, queries[..., 0].copy(), 1.0, out)
        share = Share()
        share._taken = self._scanner.submit(self._run, job, self._native.Claims(heads), share, 0)
        share.wait()

    def close(self) -> None:
        """Let the selections under way end, give the device's memory back and the index up. Idempotent."""
        self._scanner.close()
        self._chooser.close()
        self._pieces.clear()
        self._buffers.clear()
        # A view keeps the index's memory mapped, beside that of the index that takes its place.
        self._codes = self._row_scales = self._means = self._scales = torch.empty(0)

    def _run(self, job: ScanJob, claims: Any, share: Share, layers_left: int) -> None:
        heads, size = self._codes.shape[2:4]
        begin = job.first // size
        pages = job.page_ids[begin : -(-job.last // size)]
        runs = _runs(pages, self._piece_pages)
        while True:
            self._room.acquire()
            try:
                task = claims.back(heads, layers_left * heads)
                if task < 0:
                    self._room.release()
                    return
                layer = task // heads
                keys, done = self._launch(job, layer, runs, len(pages))
            except BaseException:
                self._turn -= 1  # the next layer takes its memory, not that of one that is under way
                self._room.release()
                if self._cuda:  # of a device that is lost this raises too
                    self._copy_stream.synchronize()
                raise
            share.layers += 1
            self.layers += 1
            share._written.append(self._chooser.submit(self._choose, job, layer, keys, done))

    def _choose(self, job: ScanJob, layer: int, keys: np.ndarray, done: Any) -> None:
        """The top k of a layer whose order keys [H, n] are on the host once ``done`` has happened."""
        try:
            if done is not None:
                done.synchronize()
            offset, count = job.first % self._codes.shape[3], job.last - job.first
            self._native.top_k(keys, offset, count, job.first, job.out, layer, self._isa)
        finally:
            self._room.release()

    def _launch(
        self, job: ScanJob, layer: int, runs: list[tuple[int, int, int]], num_pages: int
    ) -> tuple[np.ndarray, Any]:
        """Copy and score one layer; at most `LAYERS_UNDER_WAY` are between this and their top k.

        Args:
            runs: see `_runs`.

        Returns:
            Order keys int32 [H, num_pages * page_size], and the event after which they are there.
        """
        self._turn = (self._turn + 1) % LAYERS_UNDER_WAY
        heads, size = self._codes.shape[2:4]
        n = self._means.shape[4]
        query_codes, lead, reach = self._upload_queries(job, layer)
        means = self._buffer("means", torch.int8, (num_pages, heads, 2, n), self._copy_stream)
        scales = self._buffer("scales", torch.float32, (num_pages, heads, 2), self._copy_stream)
        row_scales = None
        if self._index.bits < 8:
            shape = (num_pages, heads, size)
            row_scales = self._buffer("row scales", torch.float32, shape, self._copy_stream)
        stride = num_pages * size
        keys = self._buffer("keys", torch.int32, (heads, stride), self._scan_stream)
        host = self._buffer("host keys", torch.int32, (heads, stride))
        with self._on(self._copy_stream):
            for at, page, count in runs:
                self._copy(means[at : at + count], self._means[layer, page : page + count])
                self._copy(scales[at : at + count], self._scales[layer, page : page + count])
                if row_scales is not None:
                    self._copy(row_scales[at : at + count], self._row_scales[layer, page : page + count])
        for first in range(0, num_pages, self._piece_pages):
            last = min(first + self._piece_pages, num_pages)
            codes, free = self._next_piece()
            with self._on(self._copy_stream):
                if free is not None:
                    self._copy_stream.wait_event(free)
                for at, page, count in runs:
                    if first <= at < last:
                        self._copy(
                            codes[at - first : at - first + count], self._codes[layer, page : page + count]
                        )
                copied = self._event()
            with self._on(self._scan_stream):
                if copied is not None:
                    self._scan_stream.wait_event(copied)
                score_codes(
                    codes[: last - first],
                    None if row_scales is None else row_scales[first:last],
                    means[first:last],
                    scales[first:last],
                    query_codes,
                    lead,
                    reach,
                    keys,
                    first * size,
                )
                self._pieces.append((codes, self._event()))
        with self._on(self._scan_stream):
            host.copy_(keys, non_blocking=True)
            done = self._event(blocking=True)
        return host.numpy(), done

    def _upload_queries(self, job: ScanJob, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query codes int8 [H, W, n], lead float32 [H, W] and reach float32 [H] of a layer, in one copy."""
        heads, n = self._codes.shape[2], self._means.shape[4]
        positions, query_heads = job.queries.shape[1:3]
        width = -(-positions * (query_heads // heads) // 16) * 16
        sizes = (heads * width * n, 4 * heads * width, 4 * heads)
        host = self._buffer("host queries", torch.uint8, (sum(sizes),))
        device = self._buffer("queries", torch.uint8, (sum(sizes),), self._copy_stream)
        self._native.prepare_layer(
            *(*self._index.arrays, self._index.signs, self._index.bits),
            *(job.queries, job.lse, job.scale, layer),
            *(part.numpy() for part in _query_views(host, sizes, (heads, width, n))),
            self._isa,
        )
        with self._on(self._copy_stream):
            device.copy_(host, non_blocking=True)
        codes, lead, reach = _query_views(device, sizes, (heads, width, n))
        return codes, lead, reach

    def _copy(self, to: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy whole pages of the index, in pieces that lie in one registration of its memory."""
        if not self._cuda:
            to.copy_(pages)
            return
        source, target = pages.view(-1).view(torch.uint8), to.view(-1).view(torch.uint8)
        # The slab's first byte is that of its array, and each registration covers REGISTER_BYTES from there.
        offset = int(pages.storage_offset()) * pages.element_size()
        total, at = source.numel(), 0
        while at < total:
            count = min(total - at, REGISTER_BYTES - (offset + at) % REGISTER_BYTES)
            target[at : at + count].copy_(source[at : at + count], non_blocking=True)
            at += count

    def _next_piece(self) -> tuple[torch.Tensor, Any]:
        """Memory for a piece of codes, and the event after which nobody reads it any more."""
        if len(self._pieces) >= PIECES:
            return self._pieces.popleft()
        shape = (self._piece_pages, *self._codes.shape[2:])
        with self._on(self._copy_stream):
            return torch.empty(shape, dtype=torch.uint8, device=self._device), None

    def _buffer(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], stream: Any = None
    ) -> torch.Tensor:
        """Memory of the layer whose turn it is, in the given shape; it only grows.

        Args:
            name: on the device, or on the host if it begins so (page-locked where the device is a GPU).
            stream: that uses the memory first. It must come from that stream's memory: other streams' free
                memory may still be in use by work that is queued there.
        """
        key = f"{name} {self._turn}"
        count = int(np.prod(shape))
        held = self._buffers.get(key)
        if held is None or held.numel() < count:
            if name.startswith("host"):
                held = torch.empty(count, dtype=dtype, pin_memory=self._cuda)
            else:
                with self._on(stream):
                    held = torch.empty(count, dtype=dtype, device=self._device)
            self._buffers[key] = held
        return held[:count].view(shape)

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def _event(self, blocking: bool = False) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event(blocking=blocking)
        event.record()
        return event


def _runs(pages: np.ndarray, piece_pages: int) -> list[tuple[int, int, int]]:
    """Ranges of consecutive page ids, cut at whole pieces: (index of the first, its id, how many)."""
    cuts = np.nonzero(np.diff(pages) != 1)[0] + 1
    edges = np.unique(np.concatenate([[0], cuts, np.arange(0, len(pages), piece_pages), [len(pages)]]))
    return [(a, int(pages[a]), b - a) for a, b in pairwise(edges.tolist())]


def _query_views(
    memory: torch.Tensor, sizes: tuple[int, ...], shape: tuple[int, int, int]
) -> list[torch.Tensor]:
    """Codes int8 ``shape`` [H, W, n], lead float32 [H, W] and reach float32 [H] in ``sizes`` bytes each."""
    codes, lead, reach = memory.split(sizes)
    return [
        codes.view(torch.int8).view(shape),
        lead.view(torch.float32).view(shape[:2]),
        reach.view(torch.float32),
    ]

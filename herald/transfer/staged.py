"""Rows packed by the CPU into a page-locked ring, moved by the copy engine, scattered on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from herald.transfer.base import RowMove, Ticket
from herald.transfer.cuda import CudaTransfer, DeviceTicket, Pairs, Ring
from herald.transfer.packing import RowPacker
from herald.transfer.streams import DeviceStreams
from herald.transfer.worker import FifoWorker
from herald_kernels import copy_rows

# A copy of 4 MiB runs at 51 of the 55 GB/s that PCIe gives; smaller ones lose more than their start
# a little earlier wins.
CHUNK_BYTES = 4 << 20
RING_SLOTS = 4


class PackSlot:
    """Packed rows of one copy and where they go, on the host and on the device."""

    def __init__(self, like: torch.Tensor, num_rows: int) -> None:
        shape = (num_rows, like.shape[1])
        self.host_rows = torch.empty(shape, dtype=like.dtype, pin_memory=True)
        self.host_ids = torch.empty(num_rows, dtype=torch.int64, pin_memory=True)
        self.id_array = self.host_ids.numpy()
        self.rows = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.ids = torch.empty(num_rows, dtype=torch.int64, device=like.device)
        self.busy: Any = None


class StagedTransfer(CudaTransfer):
    """A worker thread packs and issues, so that `submit` returns at once.

    The CPU reads the pool, so it waits for ``after``, and for copies to the host issued before, ahead
    of packing; the zero-copy kernel has both waits on the stream.

    Args:
        pool_rows: see `Transfer`; need not be page-locked.
        arena_rows: see `Transfer`.
        streams: see `CudaTransfer`.
        num_threads: threads that pack.
        chunk_bytes: rows that one copy moves, in bytes; at least one row.

    Attributes:
        packer_name: ``"native"`` with the compiled extension, else ``"numba"``.
    """

    name = "staged"

    def __init__(
        self,
        pool_rows: torch.Tensor,
        arena_rows: torch.Tensor,
        streams: DeviceStreams | None = None,
        num_threads: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__(pool_rows, arena_rows, streams)
        self._chunk_rows = max(1, chunk_bytes // self.row_bytes)
        self._packer = RowPacker(pool_rows, num_threads)
        self.packer_name = self._packer.name
        self._last_write_back: torch.cuda.Event | None = None
        with self.streams.on_copy():
            self._ring = Ring(partial(PackSlot, arena_rows, self._chunk_rows), RING_SLOTS)
            self._order = torch.arange(self._chunk_rows, device=arena_rows.device)
            # Compiles the scatter here rather than inside the first block.
            copy_rows(arena_rows[:1].clone(), self._order[:1], arena_rows[:1], self._order[:1])
            self.streams.copy.synchronize()
        self._worker = FifoWorker("herald-transfer")

    def submit(self, move: RowMove, after: Any = None) -> Ticket:
        self._check_move(move)
        ticket = self._ticket(len(move) * self.row_bytes)
        with self._lock:
            self._check_open()
            self._track(ticket)
            self._start(partial(self._pack, move, after), after, ticket)
        return ticket

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._worker.close()
        self._packer.close()
        self._drain()

    def _start(self, issue: Callable[[], None], after: Any, ticket: DeviceTicket) -> None:
        self._worker.submit(partial(self._issue, issue, after, ticket))

    def _pack(self, move: RowMove, after: Any) -> None:
        for event in (after, self._last_write_back):
            if event is not None:
                event.synchronize()
        self._last_write_back = None
        for first in range(0, len(move), self._chunk_rows):
            last = min(first + self._chunk_rows, len(move))
            slot = self._ring.acquire()
            try:
                self._send(slot, move.src_rows[first:last], move.dst_rows[first:last])
            finally:
                self._ring.release(slot)

    def _send(self, slot: PackSlot, src_rows: np.ndarray, dst_rows: np.ndarray) -> None:
        n = len(src_rows)
        self._packer.pack(slot.host_rows[:n], src_rows)
        slot.id_array[:n] = dst_rows
        slot.rows[:n].copy_(slot.host_rows[:n], non_blocking=True)
        slot.ids[:n].copy_(slot.host_ids[:n], non_blocking=True)
        copy_rows(self.arena_rows, slot.ids[:n], slot.rows[:n], self._order[:n])

    def _copy_back(self, pairs: Pairs) -> None:
        super()._copy_back(pairs)
        self._last_write_back = torch.cuda.Event()
        self._last_write_back.record()

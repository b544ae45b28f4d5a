"""Rows packed by the CPU into a page-locked ring, moved by the copy engine, scattered on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from herald.transfer.base import RowMove
from herald.transfer.cuda import CudaTransfer, DeviceTicket, Ring
from herald.transfer.packing import RowPacker
from herald.transfer.streams import DeviceStreams
from herald.transfer.worker import FifoWorker
from herald_kernels import copy_rows

# A copy of 4 MiB runs at 51 of the 55 GB/s that PCIe gives; smaller ones lose more than their start
# a little earlier wins.
CHUNK_BYTES = 4 << 20
RING_SLOTS = 4


class PackSlot:
    """Packed rows of one copy, on the host and on the device."""

    def __init__(self, like: torch.Tensor, num_rows: int) -> None:
        shape = (num_rows, like.shape[1])
        self.host_rows = torch.empty(shape, dtype=like.dtype, pin_memory=True)
        self.rows = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.busy: Any = None


class StagedTransfer(CudaTransfer):
    """Worker threads, one a direction, pack and issue, so that `submit` and `write_back` return at once.

    The CPU reads the pool, so the worker waits for ``after`` ahead of packing.

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
        with self.streams.on(self.streams.copy):
            self._ring = Ring(partial(PackSlot, arena_rows, self._chunk_rows), RING_SLOTS)
            self._order = torch.arange(self._chunk_rows, device=arena_rows.device)
            # Compiles the scatter here rather than inside the first block.
            copy_rows(arena_rows[:1].clone(), self._order[:1], arena_rows[:1], self._order[:1])
            self.streams.copy.synchronize()
        self._mover = FifoWorker("herald-transfer")
        self._writer = FifoWorker("herald-write-back")

    def _start(self, stream: Any, issue: Callable[[], None], after: Any, ticket: DeviceTicket) -> None:
        worker = self._mover if stream is self.streams.copy else self._writer
        worker.submit(partial(self._issue, stream, issue, after, ticket))

    def _end(self) -> None:
        self._mover.close()
        self._writer.close()
        self._packer.close()

    def _bring(self, move: RowMove, after: Any, ticket: DeviceTicket) -> None:
        if after is not None:
            after.synchronize()
        dst_rows = self._send_ids(move, ticket, [move.dst_rows])[0]
        for first in range(0, len(move), self._chunk_rows):
            last = min(first + self._chunk_rows, len(move))
            slot = self._ring.acquire()
            try:
                self._send(slot, move.src_rows[first:last], dst_rows[first:last])
            finally:
                self._ring.release(slot)

    def _send(self, slot: PackSlot, src_rows: np.ndarray, dst_rows: torch.Tensor) -> None:
        n = len(src_rows)
        self._packer.pack(slot.host_rows[:n], src_rows)
        slot.rows[:n].copy_(slot.host_rows[:n], non_blocking=True)
        copy_rows(self.arena_rows, dst_rows, slot.rows[:n], self._order[:n])

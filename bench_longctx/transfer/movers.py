"""Ways to bring rows, each behind the same call: start one load of rows, get its ticket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from herald.transfer import DeviceStreams, GatherKernel, RowMove, Ticket, Transfer
from herald.transfer.cuda import DeviceTicket
from herald.transfer.gather_kernel import CompiledGather, widest_piece
from herald.transfer.streams import DeviceClock

COPY_BYTES = 4 << 20


class Mover(Protocol):
    """Brings one load of rows after the other."""

    def start(self) -> Ticket:
        """Begin the next load."""

    def close(self) -> None: ...


class TransferMover:
    """A `Transfer` as the engine uses it, ids uploaded with each move.

    Args:
        transfer: closed with the mover.
        moves: taken in turn.
    """

    def __init__(self, transfer: Transfer, moves: Sequence[RowMove]) -> None:
        self._transfer = transfer
        self._moves = itertools.cycle(moves)

    def start(self) -> Ticket:
        return self._transfer.submit(next(self._moves))

    def close(self) -> None:
        self._transfer.close()


class DeviceMover:
    """Base of the movers that put work on a stream themselves."""

    def __init__(self, pool: torch.Tensor, arena: torch.Tensor, stream: Any = None) -> None:
        self.pool, self.arena = pool, arena
        self.row_bytes = pool.shape[1] * pool.element_size()
        self.stream = stream if stream is not None else DeviceStreams(arena.device).copy
        self._clock = DeviceClock(arena.device)

    def start(self) -> Ticket:
        ticket = DeviceTicket(0, self.arena.device, self._clock)
        with torch.cuda.stream(self.stream):
            ticket.begin()
            ticket.bytes = self._issue()
            ticket.finish_issue()
        return ticket

    def _issue(self) -> int:
        """Put a load on the current stream; returns its bytes."""
        raise NotImplementedError

    def close(self) -> None:
        self.stream.synchronize()


class GatherMover(DeviceMover):
    """A gather kernel alone, ids on the device beforehand.

    Args:
        pool, arena: rows of both sides.
        moves: taken in turn.
        kernel: which kernel.
        blocks: of a launch.
        chunk_bytes: rows of one launch, in bytes; 0 for one launch a move.
        stream: to launch on, or None for one of high priority.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        arena: torch.Tensor,
        moves: Sequence[RowMove],
        kernel: GatherKernel,
        blocks: int,
        chunk_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        super().__init__(pool, arena, stream)
        self.blocks = blocks
        piece = widest_piece(self.row_bytes, pool.data_ptr(), arena.data_ptr())
        problem = kernel.problem(torch.cuda.get_device_capability(arena.device), self.row_bytes, piece)
        if problem:
            raise RuntimeError(problem)
        self._gather = CompiledGather(kernel, self.row_bytes, piece)
        self._chunk_rows = chunk_bytes // self.row_bytes
        # One tensor a move: its source ids, then its destinations.
        ids = [torch.from_numpy(np.stack([move.src_rows, move.dst_rows])) for move in moves]
        self._loads = itertools.cycle([each.to(arena.device) for each in ids])
        torch.cuda.synchronize()

    def _issue(self) -> int:
        ids = next(self._loads)
        rows = ids.shape[1]
        self._gather.launch(
            self.stream.cuda_stream,
            self.blocks,
            self.pool.data_ptr(),
            self.arena.data_ptr(),
            ids[0].data_ptr(),
            ids[1].data_ptr(),
            rows,
            self._chunk_rows,
        )
        return rows * self.row_bytes


class CopyMover(DeviceMover):
    """The copy engine on rows that somebody packed: what is left when packing costs nothing."""

    def __init__(self, pool: torch.Tensor, arena: torch.Tensor, load_bytes: int) -> None:
        super().__init__(pool, arena)
        self._rows = min(load_bytes // self.row_bytes, len(arena), len(pool))

    def _issue(self) -> int:
        step = max(1, COPY_BYTES // self.row_bytes)
        for first in range(0, self._rows, step):
            last = min(first + step, self._rows)
            self.arena[first:last].copy_(self.pool[first:last], non_blocking=True)
        return self._rows * self.row_bytes

"""The CPU device: threads in place of the streams that copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from herald.transfer.base import RowMove, Span, Ticket, Transfer, copy_pairs, page_pairs
from herald.transfer.packing import as_words, copy_listed_rows
from herald.transfer.worker import FifoWorker


class HostTicket(Ticket):
    """Completion of a job of a worker thread.

    Args:
        num_bytes: payload.
        move: what moves, or None for a copy to the host.
    """

    def __init__(self, num_bytes: int, move: RowMove | None = None) -> None:
        super().__init__(num_bytes)
        self._move = move
        self._ended = threading.Event()
        self._span: Span | None = None

    def finish(self, span: Span) -> None:
        self._span = span
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._ended.set()

    def _complete(self) -> bool:
        return self._ended.is_set()

    def wait_host(self) -> None:
        self._ended.wait()
        self.raise_error()

    def wait_device(self) -> None:
        self.wait_host()

    def _device_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._move is None or self._move.then_rows is None:
            return None
        return torch.from_numpy(self._move.dst_rows), torch.from_numpy(self._move.then_rows)

    @property
    def span(self) -> Span | None:
        return self._span


class ThreadTransfer(Transfer):
    """Copies rows in threads of its own, one for each kind, that hold no lock of the interpreter meanwhile.

    ``after`` may be None or anything with ``synchronize()``, which the worker calls first.
    """

    name = "thread"

    def __init__(self, pool_rows: torch.Tensor, arena_rows: torch.Tensor) -> None:
        super().__init__(pool_rows, arena_rows)
        self._pool_words = as_words(pool_rows)
        self._arena_words = as_words(arena_rows).view(self._pool_words.dtype)
        # Compiles the kernel here rather than inside the first block.
        copy_listed_rows(self._arena_words, np.empty(0, np.int64), self._pool_words, np.empty(0, np.int64))
        self._mover = FifoWorker("herald-transfer")
        self._writer = FifoWorker("herald-write-back")
        self._loader = FifoWorker("herald-load")
        self._order = threading.Lock()

    def submit(self, move: RowMove, after: Any = None) -> Ticket:
        self._check_move(move)
        copy = partial(copy_listed_rows, self._arena_words, move.dst_rows, self._pool_words, move.src_rows)
        return self._queue(self._mover, copy, after, HostTicket(len(move) * self.row_bytes, move))

    def write_back(
        self,
        src: torch.Tensor | Sequence[torch.Tensor],
        dst: torch.Tensor | Sequence[torch.Tensor],
        after: Any = None,
    ) -> Ticket:
        pairs = copy_pairs(src, dst)

        def copy() -> None:
            for source, target in pairs:
                target.copy_(source)

        return self._queue(self._writer, copy, after, HostTicket(sum(t.nbytes for _, t in pairs)))

    def load_pages(self, src: Sequence[torch.Tensor], dst: torch.Tensor, after: Any = None) -> Ticket:
        pairs = page_pairs(src, dst)

        def copy() -> None:
            for source, target in pairs:
                target.copy_(source)

        return self._queue(self._loader, copy, after, HostTicket(dst.nbytes))

    def close(self) -> None:
        with self._order:
            if not self._shut():
                return
        self._mover.close()
        self._writer.close()
        self._loader.close()
        self._raise_unseen()

    def _queue(
        self, worker: FifoWorker, copy: Callable[[], None], after: Any, ticket: HostTicket
    ) -> HostTicket:
        with self._order:
            self._admit(ticket)
            worker.submit(partial(self._run, copy, after, ticket))
        return ticket

    def _run(self, copy: Callable[[], None], after: Any, ticket: HostTicket) -> None:
        try:
            if after is not None:
                after.synchronize()
            if self.delay is not None:
                self.delay()
            start = time.perf_counter()
            copy()
            ticket.finish((start, time.perf_counter()))
        except BaseException as error:
            ticket.fail(error)

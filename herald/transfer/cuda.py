"""What the ways to a CUDA device share: tickets made of events, reused buffers, copies to the host."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from herald.kvstore.host_memory import REGISTER_BYTES
from herald.transfer.base import RowMove, Span, Ticket, Transfer, copy_pairs, page_pairs
from herald.transfer.pinned import PinnedRing
from herald.transfer.streams import DeviceClock, DeviceStreams

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

# Page-locked memory for ids of moves: a move of 150,000 rows has 3.6 MB of ids.
RING_BYTES = 16 << 20
# Device memory in which pages that arrive wait to be laid out by position.
LOAD_BYTES = 32 << 20


class DeviceTicket(Ticket):
    """Completion of work on one of the streams that copy, between two timed events.

    The work may still have to be issued, by a worker thread: until then `wait_host` and `wait_device`
    block the calling thread.
    """

    def __init__(self, num_bytes: int, device: torch.device, clock: DeviceClock) -> None:
        super().__init__(num_bytes)
        self._device = device
        self._clock = clock
        self._start = torch.cuda.Event(enable_timing=True)
        # Who waits for it sleeps, and leaves the core to those who score rows.
        self._end = torch.cuda.Event(enable_timing=True, blocking=True)
        self._issued_at = 0.0
        self._issued = threading.Event()
        self._span: Span | None = None
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep_rows(self, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Give the ticket the ids that `device_rows` returns, before `finish_issue`."""
        self._rows = rows

    def begin(self, stream: Any = None) -> None:
        """Record the start on ``stream``, or on the current one."""
        self._issued_at = time.perf_counter()
        self._start.record(stream)

    def finish_issue(self, stream: Any = None) -> None:
        """Record the end on ``stream``, or on the current one: everything has been issued."""
        self._end.record(stream)
        self._issued.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._issued.set()

    def _complete(self) -> bool:
        return self._issued.is_set() and (self.failed or self._end.query())

    def wait_host(self) -> None:
        self._wait_issued()
        self._end.synchronize()

    def wait_device(self) -> None:
        self._wait_issued()
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def _device_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._wait_issued()
        if self._rows is not None:
            # Their memory belongs to the copy stream, which would use it again as soon as the ticket goes.
            stream = torch.cuda.current_stream(self._device)
            for rows in self._rows:
                rows.record_stream(stream)
        return self._rows

    def _wait_issued(self) -> None:
        self._issued.wait()
        self.raise_error()

    @property
    def span(self) -> Span | None:
        if self._span is None and not self.failed and self._complete():
            self._span = self._clock.span(self._start, self._end, self._issued_at)
        return self._span


class RingSlot(Protocol):
    """A set of buffers that asynchronous work uses until ``busy`` (an event, None at first) happens."""

    busy: Any


Slot = TypeVar("Slot", bound=RingSlot)


class Ring(Generic[Slot]):
    """Buffers used in turn, each again only when the device is through with it.

    Args:
        make: makes a slot.
        size: how many.
    """

    def __init__(self, make: Callable[[], Slot], size: int) -> None:
        self._free = deque(make() for _ in range(size))

    def acquire(self) -> Slot:
        """The slot that was released first; blocks until its work is complete."""
        slot = self._free[0]
        if slot.busy is not None:
            slot.busy.synchronize()
        return self._free.popleft()

    def release(self, slot: Slot) -> None:
        """Give a slot back after the work issued so far on the current stream."""
        event = torch.cuda.Event()
        event.record()
        slot.busy = event
        self._free.append(slot)


class CudaTransfer(Transfer):
    """Base of the transfers to a CUDA device.

    Args:
        pool_rows: see `Transfer`.
        arena_rows: see `Transfer`.
        streams: streams of the arena's device, or None to make them.
    """

    def __init__(
        self, pool_rows: torch.Tensor, arena_rows: torch.Tensor, streams: DeviceStreams | None = None
    ) -> None:
        super().__init__(pool_rows, arena_rows)
        self.streams = streams if streams is not None else DeviceStreams(arena_rows.device)
        self.register_bytes = REGISTER_BYTES
        # Whoever filled the arena did so on the compute stream.
        for stream in (self.streams.copy, self.streams.back, self.streams.load):
            stream.wait_stream(torch.cuda.current_stream(self.streams.device))
        self._clock = DeviceClock(self.streams.device)
        self._in_flight: deque[tuple[DeviceTicket, Pairs]] = deque()
        self._move_ids = PinnedRing(RING_BYTES)
        # One a direction: who issues a move may have to wait for a buffer, who writes back must not.
        self._move_order = threading.Lock()
        self._back_order = threading.Lock()
        self._load_order = threading.Lock()

    def submit(self, move: RowMove, after: Any = None) -> Ticket:
        self._check_move(move)
        ticket = self._ticket(len(move) * self.row_bytes)
        with self._move_order:
            self._admit(ticket)
            self._start(self.streams.copy, partial(self._bring, move, after, ticket), after, ticket)
        return ticket

    def write_back(
        self,
        src: torch.Tensor | Sequence[torch.Tensor],
        dst: torch.Tensor | Sequence[torch.Tensor],
        after: Any = None,
    ) -> Ticket:
        pairs = copy_pairs(src, dst)
        ticket = self._ticket(sum(target.nbytes for _, target in pairs))
        with self._back_order:
            self._admit(ticket)
            # Tensors dropped by the caller live on here, else their memory would be handed out again
            # while the copy engine still reads or writes it.
            while self._in_flight and self._in_flight[0][0]._complete():
                self._in_flight.popleft()
            self._in_flight.append((ticket, pairs))
            self._start(self.streams.back, partial(self._copy_back, pairs), after, ticket)
        return ticket

    def load_pages(self, src: Sequence[torch.Tensor], dst: torch.Tensor, after: Any = None) -> Ticket:
        pairs = page_pairs(src, dst)
        ticket = self._ticket(dst.nbytes)
        with self._load_order:
            self._admit(ticket)
            self._issue(self.streams.load, partial(self._load, pairs), after, ticket)
        return ticket

    def close(self) -> None:
        with self._move_order, self._back_order, self._load_order:
            if not self._shut():
                return
        self._end()
        self.streams.copy.synchronize()
        self.streams.back.synchronize()
        self.streams.load.synchronize()
        self._in_flight.clear()
        self._raise_unseen()

    @abstractmethod
    def _bring(self, move: RowMove, after: Any, ticket: DeviceTicket) -> None:
        """Put a move on the copy stream, which is current and has waited for ``after``."""

    def _end(self) -> None:
        """End the threads, if there are any, after what was submitted."""

    def _send_ids(self, move: RowMove, ticket: DeviceTicket, arrays: list[np.ndarray]) -> torch.Tensor:
        """Upload id lists of a move, its ``dst_rows`` the last of them, on the current stream.

        The ticket gets ``then_rows`` too, where the move has them. The memory is the copy stream's, so it
        may be dropped as soon as its readers are issued.

        Returns:
            int64 [arrays, n], or one more with ``then_rows``.
        """
        if move.then_rows is not None:
            arrays = [*arrays, move.then_rows]
        ids = torch.empty((len(arrays), len(move)), dtype=torch.int64, device=self.streams.device)
        self._move_ids.send(ids, arrays)
        if move.then_rows is not None:
            ticket.keep_rows((ids[-2], ids[-1]))
        return ids

    def _ticket(self, num_bytes: int) -> DeviceTicket:
        return DeviceTicket(num_bytes, self.streams.device, self._clock)

    def _start(self, stream: Any, issue: Callable[[], None], after: Any, ticket: DeviceTicket) -> None:
        """Have ``issue`` put its work on ``stream``, now or in the order of a worker thread."""
        self._issue(stream, issue, after, ticket)

    def _issue(self, stream: Any, issue: Callable[[], None], after: Any, ticket: DeviceTicket) -> None:
        try:
            with self.streams.on(stream):
                if after is not None:
                    stream.wait_event(after)
                if self.delay is not None:
                    self.delay()
                ticket.begin(stream)
                issue()
                ticket.finish_issue(stream)
        except BaseException as error:
            ticket.fail(error)

    def _copy_back(self, pairs: Pairs) -> None:
        base = self.pool_rows.data_ptr()
        for source, target in pairs:
            pieces = within_registrations(target, base, self.register_bytes)
            if len(pieces) == 1:
                target.copy_(source, non_blocking=True)
                continue
            for begin, end in pieces:
                target[begin:end].copy_(source[begin:end], non_blocking=True)

    def _load(self, pairs: Pairs) -> None:
        """Bring runs of pages by the copy engine, in pieces, and lay each out by position."""
        base = self.pool_rows.data_ptr()
        piece = max(1, LOAD_BYTES // max((source[0].nbytes for source, _ in pairs), default=LOAD_BYTES))
        for source, target in pairs:
            for first in range(0, len(source), piece):
                pages = source[first : first + piece]
                # Memory of this stream: the next piece may take it as soon as this one is laid out.
                arrived = torch.empty(pages.shape, dtype=pages.dtype, device=target.device)
                flat, into = pages.view(-1), arrived.view(-1)
                for begin, end in within_registrations(flat, base, self.register_bytes):
                    into[begin:end].copy_(flat[begin:end], non_blocking=True)
                target[first : first + piece].copy_(arrived)


def within_registrations(target: torch.Tensor, base: int, size: int) -> list[tuple[int, int]]:
    """Element ranges of a flat host tensor that each lie in one registered piece of the pool.

    CUDA refuses an asynchronous copy that crosses from one registration into the next ("invalid
    argument"), even where the two are adjacent.

    Args:
        base: address of the pool, where its first registration begins.
        size: bytes of a registration.
    """
    start = target.data_ptr() - base
    stop = start + target.nbytes
    edges = range((start // size + 1) * size, stop, size)
    cuts = [0, *((edge - start) // target.element_size() for edge in edges), target.numel()]
    return list(pairwise(cuts))

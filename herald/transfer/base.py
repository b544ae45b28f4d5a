"""What every way of moving rows has in common: the move, the ticket, the interface."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from herald.errors import UsageError
from herald.transfer.packing import first_outside

Span = tuple[float, float]


@dataclass(frozen=True, eq=False)
class RowMove:
    """Rows to bring to the device.

    Args:
        src_rows: int64 [n], row ids in the host pool's flat rows. Sorted ids travel fastest.
        dst_rows: int64 [n], row ids in the arena's flat rows, distinct.
        then_rows: int64 [n], where in the arena the caller puts each arrival later, or None. They travel
            with the move and come out of `Ticket.device_rows`; the transfer itself does not use them.

    The arrays must not change until the ticket is done: some transfers read them later. Strided ones
    are copied.

    Raises:
        UsageError: an array is not one-dimensional int64, or their lengths differ.
    """

    src_rows: np.ndarray
    dst_rows: np.ndarray
    then_rows: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("src_rows", "dst_rows", "then_rows"):
            ids = getattr(self, name)
            if ids is None and name == "then_rows":
                continue
            if ids.dtype != np.int64 or ids.ndim != 1:
                raise UsageError(f"{name} is {ids.dtype} {ids.shape}", "pass a one-dimensional int64 array")
            if len(ids) != len(self.src_rows):
                raise UsageError(
                    f"{len(ids)} {name} for {len(self.src_rows)} src_rows", "pass as many of each"
                )
            object.__setattr__(self, name, np.ascontiguousarray(ids))

    def __len__(self) -> int:
        return len(self.src_rows)


class Ticket(ABC):
    """The completion of one transfer. Its methods may be called from any thread, any number of times.

    An error of the transfer is raised by `done`, `wait_host` and `wait_device`, each time; one that none
    of them has handed out is raised by `Transfer.close`.

    Attributes:
        bytes: payload of the transfer.
    """

    def __init__(self, num_bytes: int) -> None:
        self.bytes = num_bytes
        self._error: BaseException | None = None
        self._error_seen = False

    def done(self) -> bool:
        """Whether the transfer is complete. Never blocks."""
        complete = self._complete()
        self.raise_error()
        return complete

    @abstractmethod
    def _complete(self) -> bool:
        """Whether the transfer ended, well or not. Never blocks."""

    @abstractmethod
    def wait_host(self) -> None:
        """Block the calling thread until the transfer is complete."""

    @abstractmethod
    def wait_device(self) -> None:
        """Make later work on the calling thread's current stream wait (on the CPU: `wait_host`)."""

    def device_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(dst_rows, then_rows) of the move on the arena's device, int64 [n] each.

        For work on the stream that is current now, issued after `wait_device`. The tensors are the
        ticket's own; they stay valid as long as the ticket or they themselves are referenced.

        Raises:
            UsageError: the move had no ``then_rows``.
        """
        rows = self._device_rows()
        if rows is None:
            raise UsageError("the move came without then_rows", "make it as RowMove(src, dst, then_rows)")
        return rows

    @abstractmethod
    def _device_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `device_rows`; None where the move had no ``then_rows``."""

    @property
    @abstractmethod
    def span(self) -> Span | None:
        """Start and end in seconds on the clock of `time.perf_counter`; None until done, or failed."""

    @property
    def seconds(self) -> float | None:
        """Duration of the transfer without the time it queued; None until done, or failed."""
        span = self.span
        return None if span is None else span[1] - span[0]

    def fail(self, error: BaseException) -> None:
        """Complete the transfer with ``error``."""
        self._error = error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def raise_error(self, unseen_only: bool = False) -> None:
        """Raise the transfer's error, if it has one (and, if ``unseen_only``, if nobody has seen it)."""
        if self._error is not None and not (unseen_only and self._error_seen):
            self._error_seen = True
            raise self._error


class Transfer(ABC):
    """Moves rows between the host pool and the device arena.

    Moves keep the order in which they were submitted, and so do copies to the host among themselves.
    The two kinds do not wait for one another: a finished block's rows do not queue behind the rows that
    arrive, nor the reverse. Hence one rule for the caller: a row may be fetched when the `wait_host` of
    the copy that wrote it has returned, and overwritten when the ticket of the last move that reads it is
    done. Whoever indexes a row before it is selected keeps the first half by itself.

    Args:
        pool_rows: [pool rows, 2 * head_dim] host tensor, contiguous; row ids of `RowMove.src_rows`.
        arena_rows: [arena rows, 2 * head_dim] device tensor, contiguous, of the same dtype; row ids of
            `RowMove.dst_rows`.

    Both tensors stay referenced until `close`.

    Attributes:
        name: the way rows travel, for figures and messages.
        delay: called before each transfer begins, in the thread and on the stream that issues it, so
            that a test of races can stretch it. None in normal use.

    Raises:
        UsageError: a tensor is not a contiguous matrix, or the two do not hold the same kind of rows.
    """

    name = ""

    def __init__(self, pool_rows: torch.Tensor, arena_rows: torch.Tensor) -> None:
        for what, rows in (("pool_rows", pool_rows), ("arena_rows", arena_rows)):
            if rows.ndim != 2 or not rows.is_contiguous():
                raise UsageError(
                    f"{what} has shape {tuple(rows.shape)}", "pass a contiguous [rows, width] tensor"
                )
        if pool_rows.dtype != arena_rows.dtype or pool_rows.shape[1] != arena_rows.shape[1]:
            raise UsageError(
                f"pool rows of {pool_rows.shape[1]} x {pool_rows.dtype} cannot become "
                f"arena rows of {arena_rows.shape[1]} x {arena_rows.dtype}",
                "give both the same width and dtype",
            )
        self.pool_rows = pool_rows
        self.arena_rows = arena_rows
        self.row_bytes = pool_rows.shape[1] * pool_rows.element_size()
        self.delay: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._unsettled: deque[Ticket] = deque()
        self._failed: list[Ticket] = []
        # Compiles the check here rather than inside the first block.
        first_outside(np.empty(0, np.int64), 0)

    @abstractmethod
    def submit(self, move: RowMove, after: Any = None) -> Ticket:
        """Bring rows from the pool to the arena: ``arena[dst_rows[i]] = pool[src_rows[i]]``.

        Callable from any thread. The caller keeps the arena rows unread until the ticket is waited for.

        Args:
            move: the rows.
            after: event (torch.cuda.Event) before which neither side may be touched, or None.

        Raises:
            UsageError: an id is outside its tensor, or the transfer is closed. Anything that goes
                wrong later is raised by the ticket.
        """

    @abstractmethod
    def write_back(
        self,
        src: torch.Tensor | Sequence[torch.Tensor],
        dst: torch.Tensor | Sequence[torch.Tensor],
        after: Any = None,
    ) -> Ticket:
        """Copy contiguous device tensors to contiguous host tensors (or views) of the same bytes.

        Both are kept alive until the copy is complete; the caller must not change ``src`` before that.

        Args:
            src: one device tensor, or several.
            dst: as many host tensors of the same dtypes and numbers of elements. Page-locked ones are
                written without blocking anybody.
            after: event after which ``src`` may be read, or None.

        Raises:
            UsageError: the tensors do not match, are not contiguous, or the transfer is closed.
        """

    @abstractmethod
    def load_pages(self, src: Sequence[torch.Tensor], dst: torch.Tensor, after: Any = None) -> Ticket:
        """Copy pages of the pool, one behind the other, to a device tensor of positions.

        Does not queue behind moves nor copies to the host, and they not behind it. The caller keeps ``dst``
        alive and unread, and the pages as they are, until the ticket is done.

        Args:
            src: runs of pages, each [pages, kv_heads, page_size, 2 * head_dim], contiguous.
            dst: [kv_heads, pages of all runs * page_size, 2 * head_dim] of the same dtype, rows contiguous.
            after: event after which ``dst`` may be written, or None.

        Raises:
            UsageError: the shapes do not match, or the transfer is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete what was submitted, then end the threads. Idempotent.

        Raises:
            the first error of a transfer whose ticket nobody asked.
        """

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_move(self, move: RowMove) -> None:
        """Refuse ids that would read or write outside the two tensors: the kernels do not look."""
        for ids, rows, what in (
            (move.src_rows, self.pool_rows, "pool"),
            (move.dst_rows, self.arena_rows, "arena"),
            (move.then_rows, self.arena_rows, "arena"),
        ):
            at = -1 if ids is None else first_outside(ids, len(rows))
            if ids is not None and at >= 0:
                raise UsageError(
                    f"row {ids[at]} (entry {at}) is outside the {what}", f"use ids from 0 to {len(rows) - 1}"
                )

    def _admit(self, ticket: Ticket) -> None:
        """Remember ``ticket`` until it is complete, so that `close` can raise what nobody saw.

        Raises:
            UsageError: the transfer is closed.
        """
        with self._lock:
            if self._closed:
                raise UsageError("the transfer is closed", "make a new one with make_transfer")
            while self._unsettled and self._unsettled[0]._complete():
                oldest = self._unsettled.popleft()
                if oldest.failed:
                    self._failed.append(oldest)
            self._unsettled.append(ticket)

    def _shut(self) -> bool:
        """Admit nothing from now on; False if that was so already."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        return was_open

    def _raise_unseen(self) -> None:
        tickets = [*self._failed, *self._unsettled]
        self._failed, self._unsettled = [], deque()
        for ticket in tickets:
            ticket.raise_error(unseen_only=True)


def copy_pairs(
    src: torch.Tensor | Sequence[torch.Tensor], dst: torch.Tensor | Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Flat (source, destination) pairs of a `Transfer.write_back`, checked.

    Raises:
        UsageError: see `Transfer.write_back`.
    """
    sources = [src] if isinstance(src, torch.Tensor) else list(src)
    targets = [dst] if isinstance(dst, torch.Tensor) else list(dst)
    if len(sources) != len(targets):
        raise UsageError(f"{len(sources)} sources for {len(targets)} destinations", "pass as many of each")
    for s, t in zip(sources, targets, strict=True):
        if s.dtype != t.dtype or s.numel() != t.numel():
            raise UsageError(
                f"cannot write {s.numel()} x {s.dtype} over {t.numel()} x {t.dtype}",
                "pass tensors of equal bytes",
            )
        if not (s.is_contiguous() and t.is_contiguous()):
            raise UsageError(
                "write_back got a strided tensor", "pass contiguous tensors, one pair per run of bytes"
            )
        if t.device.type != "cpu":
            raise UsageError(f"write_back to {t.device}", "pass host tensors as destinations")
    return [(s.view(-1), t.view(-1)) for s, t in zip(sources, targets, strict=True)]


def page_pairs(src: Sequence[torch.Tensor], dst: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each run of pages the part of ``dst`` that it fills, as [pages, kv_heads, page_size, 2 * head_dim].

    Raises:
        UsageError: see `Transfer.load_pages`.
    """
    pairs, at = [], 0
    for run in src:
        pages, heads, size, width = run.shape
        part = dst[:, at : at + pages * size]
        if part.shape != (heads, pages * size, width) or run.dtype != dst.dtype or not run.is_contiguous():
            raise UsageError(
                f"pages {tuple(run.shape)} {run.dtype} from position {at} on do not fit "
                f"{tuple(dst.shape)} {dst.dtype}",
                "pass contiguous runs of pages, and as many positions for them",
            )
        pairs.append((run, part.unflatten(1, (pages, size)).transpose(0, 1)))
        at += pages * size
    if at != dst.shape[1]:
        raise UsageError(f"{at} positions for {dst.shape[1]}", "pass as many of each")
    return pairs

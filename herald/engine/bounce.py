"""Page-locked host buffers for what the device sends: finished blocks, queries of a look-ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from herald.transfer import Ticket, Transfer


class BounceBuffers:
    """Host buffers that copies from the device land in. Thread-safe.

    The rows of a block are scattered over the pool's pages; one buffer makes one copy of them.

    Args:
        most: free buffers of one shape that are kept.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._free: dict[tuple[torch.Size, torch.dtype], deque[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """A buffer of the shape and dtype of ``rows``, page-locked when they are on a GPU."""
        with self._lock:
            free = self._free.get((rows.shape, rows.dtype))
            if free:
                return free.popleft()
        return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)

    def give_back(self, buffer: torch.Tensor) -> None:
        """The buffer was read and may be taken again."""
        key = buffer.shape, buffer.dtype
        with self._lock:
            self._free.setdefault(key, deque(maxlen=self._most)).appendleft(buffer)


class Sent:
    """Rows on their way to the host.

    Args:
        bounce: gives the buffers that they land in.
        rows: on the device, unchanged from now on.
        transfer: copies them.
        after: event after which they are there, None on a CPU.

    Attributes:
        ticket: of the copies.

    Raises:
        What `herald.transfer.Transfer.write_back` raises; no buffer is lost then.
    """

    def __init__(
        self,
        bounce: BounceBuffers,
        rows: tuple[torch.Tensor, ...],
        transfer: Transfer,
        after: torch.cuda.Event | None,
    ) -> None:
        self._bounce = bounce
        self._buffers: list[torch.Tensor] = []
        try:
            for part in rows:
                self._buffers.append(bounce.take(part))
            self.ticket: Ticket = transfer.write_back(rows, self._buffers, after=after)
        except BaseException:
            self._give_back()
            raise

    @contextmanager
    def arrived(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The buffers once they are filled; they are free again afterwards, whatever happens. Once only.

        Raises:
            What ended the copies. Some of them may still be under way then, so that nobody gets these buffers
            again; their memory goes back where it came from.
        """
        self.ticket.wait_host()
        try:
            yield tuple(self._buffers)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        while self._buffers:
            self._bounce.give_back(self._buffers.pop())

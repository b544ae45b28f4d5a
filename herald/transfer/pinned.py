"""Host arrays on their way to the device through page-locked memory, without anybody waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Ranges begin on a cache line.
ALIGN_BYTES = 64


class PinnedRing:
    """Page-locked memory used in turn: arrays are copied into it and sent on from there.

    Thread-safe. A range is used again only when the device has read it, so a sender blocks only where
    more than the ring holds is under way.

    Args:
        num_bytes: size of the ring, a multiple of 256. Arrays of more than a quarter of it go in pieces.
    """

    def __init__(self, num_bytes: int) -> None:
        self._host = self._allocate(num_bytes)
        self._bytes = self._host.numpy()
        self._size = num_bytes
        self._piece = num_bytes // 4
        self._lock = threading.Lock()
        # Positions grow for ever; a byte's place is its position modulo the size.
        self._head = 0
        self._tail = 0
        self._busy: deque[tuple[int, Any]] = deque()

    def send(self, out: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
        """Fill ``out`` with the bytes of ``arrays``, one behind the other, on the current stream.

        Args:
            out: contiguous tensor on the device, of as many bytes.
            arrays: contiguous; they may be changed as soon as this returns.
        """
        target = out.view(-1).view(torch.uint8)
        parts = deque(array.reshape(-1).view(np.uint8) for array in arrays)
        with self._lock:
            for first in range(0, target.numel(), self._piece):
                size = min(self._piece, target.numel() - first)
                at = self._reserve(size)
                self._fill(at, size, parts)
                target[first : first + size].copy_(self._host[at : at + size], non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._busy.append((self._head, event))

    @staticmethod
    def _allocate(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _reserve(self, size: int) -> int:
        """Place of ``size`` free bytes in a row; waits for the oldest ranges until there are as many."""
        start = self._head
        to_edge = self._size - start % self._size
        if size > to_edge:
            start += to_edge
        end = -(-(start + size) // ALIGN_BYTES) * ALIGN_BYTES
        while self._busy and end - self._tail > self._size:
            self._tail, event = self._busy.popleft()
            event.synchronize()
        self._head = end
        if not self._busy:
            self._tail = start
        return start % self._size

    def _fill(self, at: int, size: int, parts: deque[np.ndarray]) -> None:
        """Copy the next ``size`` bytes of ``parts``, which lose them, to ``at``."""
        while size:
            part = parts.popleft()
            taken = min(len(part), size)
            self._bytes[at : at + taken] = part[:taken]
            if taken < len(part):
                parts.appendleft(part[taken:])
            at, size = at + taken, size - taken

"""Page-locked host buffers for what the device sends: finished blocks, queries of a look-ahead."""

from __future__ import annotations

import threading
from collections import deque

import torch


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

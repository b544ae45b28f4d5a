"""A request for `DeviceScan`, on any device."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from herald.config import IndexBits
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.kvstore.native import find_native
from herald.select import Selector
from herald.select.device_scan import DeviceScan, ScanJob

native: Any = find_native().module
LAYERS, HEADS, GROUP = 5, 2, 3


class Case:
    """A request in a pool whose other pages hold garbage, with queries for it."""

    def __init__(
        self, page_size: int, head_dim: int, positions: int, num_pages: int, pin: bool, bits: IndexBits = 8
    ) -> None:
        rng = np.random.default_rng(page_size * head_dim + positions)
        layout = RowLayout(LAYERS, HEADS, head_dim, page_size, torch.float32)
        self.pool = HostPool(layout, num_pages + 3, pin=False)
        values = rng.standard_normal(self.pool.rows.shape, dtype=np.float32)
        self.pool.rows.copy_(torch.from_numpy(values) + 0.5)
        self.index = KeyIndex(self.pool, bits, pin=pin)
        self.index.codes[:] = 255
        # two ranges of pages, the second before the first in memory
        half = num_pages // 2
        self.pages = np.concatenate([np.arange(half + 2, num_pages + 2), np.arange(1, half + 1)]).astype(
            np.int32
        )
        self.index.append_span(self.pages, 0, num_pages * page_size)
        self.queries = rng.standard_normal((LAYERS, positions, HEADS * GROUP, head_dim)).astype(np.float32)
        self.lse = rng.standard_normal(self.queries.shape[:3]).astype(np.float32)

    def job(self, first: int, last: int, k: int) -> ScanJob:
        out = np.full((LAYERS, HEADS, k), -1, dtype=np.int32)
        return ScanJob(self.pages, first, last, self.queries, self.lse, 0.3, out)

    def selector(self, device: torch.device | None = None) -> Selector:
        return Selector(self.pool, self.index, num_threads=2, device=device)

    def scan(self, device: str, held: int = 0) -> DeviceScan:
        """One that keeps ``held`` layers of the index on the device."""
        room = -(-self.index.num_bytes * held // LAYERS)
        return DeviceScan(native, self.index, torch.device(device), "auto", least=0, device_bytes=room)

    def close(self) -> None:
        self.index.close()
        self.pool.close()


class Slow:
    """The extension, with a `select` that waits for the other side."""

    def __init__(self, module: Any, started: threading.Event, select: Any) -> None:
        self.Claims, self.query_width = module.Claims, module.query_width
        self._started, self._select = started, select

    def select(self, *arguments: Any) -> None:
        assert self._started.wait(10)
        self._select(*arguments)

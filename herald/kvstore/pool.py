"""The host pool: every row of every request, in pages of one pinned slab."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch
from numpy.typing import ArrayLike

from herald.config import check
from herald.errors import HostPoolTooSmall, UsageError
from herald.kvstore.host_memory import HostSlab
from herald.kvstore.layout import RowLayout
from herald.kvstore.pages import PageAllocator
from herald.kvstore.row_values import as_numpy


class HostPool:
    """``num_pages`` pages of rows over one slab.

    Args:
        layout: shape of a row and a page.
        num_pages: pages the pool holds.
        pin: pin the slab for the GPU (see `HostSlab`).
        num_threads: threads of the slab's first touch, 0 for all usable cores.

    Attributes:
        rows: torch tensor [L, P, H, page_size, 2 * head_dim] of ``layout.dtype``; K first, then V.
        flat_rows: the same memory, [L * P * H * page_size, 2 * head_dim].
        allocator: which pages are in use.
        slab: the memory, with `pinned` and `pin_reason`.

    Raises:
        HostPoolTooSmall: the memory is not there; says how many tokens would fit.
    """

    def __init__(self, layout: RowLayout, num_pages: int, pin: bool, num_threads: int = 0) -> None:
        check(num_pages >= 1, "num_pages", num_pages, "use 1 or more")
        self.layout = layout
        self.num_pages = num_pages
        self.num_bytes = layout.page_bytes * num_pages
        self.allocator = PageAllocator(num_pages)
        try:
            self.slab = HostSlab(self.num_bytes, pin, num_threads)
        except HostPoolTooSmall as error:
            tokens = num_pages * layout.page_size
            raise HostPoolTooSmall(
                f"a host pool for {tokens} tokens takes {self.num_bytes} bytes: {error.problem}",
                f"{error.remedy} ({layout.token_bytes} bytes a token)",
            ) from error
        shape = (layout.num_layers, num_pages, layout.num_kv_heads, layout.page_size, 2 * layout.head_dim)
        self.rows = self.slab.tensor(layout.dtype, shape)
        self.flat_rows = self.rows.view(-1, 2 * layout.head_dim)

    def write_block(self, page: int, offset: int, rows: torch.Tensor) -> None:
        """Copy a block's rows into a page.

        Args:
            offset: row of the page that the first position goes to.
            rows: [L, H, B, 2 * head_dim] of ``layout.dtype``, on the host.

        Raises:
            UsageError: the shape or dtype does not fit, or the block lies outside the page.
        """
        layout = self.layout
        shape = (layout.num_layers, layout.num_kv_heads, rows.shape[2] if rows.ndim == 4 else 0)
        if rows.shape != (*shape, 2 * layout.head_dim) or rows.dtype != layout.dtype:
            expected = f"[{shape[0]}, {shape[1]}, B, {2 * layout.head_dim}] {layout.dtype}"
            raise UsageError(
                f"a block of shape {tuple(rows.shape)} {rows.dtype} does not fit", f"use {expected}"
            )
        if not (0 <= page < self.num_pages and 0 <= offset <= layout.page_size - shape[2]):
            raise UsageError(
                f"rows {offset} to {offset + shape[2]} of page {page} do not exist",
                f"use rows 0 to {layout.page_size} of pages 0 to {self.num_pages - 1}",
            )
        # Not torch's copy: its threads, one a core, would take the cores from a selection and then spin.
        np.copyto(as_numpy(self.rows[:, page, :, offset : offset + shape[2]]), as_numpy(rows))

    def row_ids(
        self, layer: ArrayLike, head: ArrayLike, page_ids: ArrayLike, positions: ArrayLike
    ) -> np.ndarray:
        """Flat row ids (int64) of ``positions`` of a request whose pages are ``page_ids``.

        ``layer``, ``head`` and ``positions`` broadcast together.

        Raises:
            UsageError: a position lies outside the pages.
        """
        where = np.asarray(positions, dtype=np.int64)
        pages = np.asarray(page_ids, dtype=np.int64)
        layout = self.layout
        limit = len(pages) * layout.page_size
        if where.size and (where.min() < 0 or where.max() >= limit):
            bad = int(where.min() if where.min() < 0 else where.max())
            raise UsageError(f"position {bad} lies outside the pages", f"use positions 0 to {limit - 1}")
        block = np.asarray(layer, dtype=np.int64) * self.num_pages + pages[where // layout.page_size]
        slot = where % layout.page_size
        return (block * layout.num_kv_heads + np.asarray(head, dtype=np.int64)) * layout.page_size + slot

    def close(self) -> None:
        """Give the memory back (see `HostSlab.close`). Closing twice is allowed."""
        if not self.slab.closed:
            del self.rows, self.flat_rows
            self.slab.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The host pool: every row of every request, in pages of one pinned slab."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike

from herald.config import check
from herald.errors import HostPoolTooSmall, UsageError
from herald.kvstore.host_memory import HostSlab
from herald.kvstore.layout import RowLayout
from herald.kvstore.pages import PageAllocator
from herald.kvstore.row_values import row_ids_of_positions


class HostPool:
    """``num_pages`` pages of rows over one slab.

    Args:
        layout: shape of a row and a page.
        num_pages: pages the pool holds.
        pin: pin the slab for the GPU (see `HostSlab`).

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
        self._check_positions(where, pages)
        layout = self.layout
        block = np.asarray(layer, dtype=np.int64) * self.num_pages + pages[where // layout.page_size]
        slot = where % layout.page_size
        return (block * layout.num_kv_heads + np.asarray(head, dtype=np.int64)) * layout.page_size + slot

    def row_ids_all(self, page_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Flat row ids [L, H, n] (int64) of ``positions`` [L, H, n] int32 of every layer and head.

        Compiled and without the interpreter lock; a position of -1 (padding) gives -1.

        Raises:
            UsageError: the shape is not [L, H, n], or a position lies outside the pages.
        """
        layout = self.layout
        if positions.ndim != 3 or positions.shape[:2] != (layout.num_layers, layout.num_kv_heads):
            raise UsageError(
                f"positions of shape {positions.shape} are not per layer and head",
                f"use [{layout.num_layers}, {layout.num_kv_heads}, n]",
            )
        self._check_positions(np.maximum(positions, 0), page_ids)
        return row_ids_of_positions(
            np.ascontiguousarray(page_ids, dtype=np.int32),
            np.ascontiguousarray(positions, dtype=np.int32),
            self.num_pages,
            layout.page_size,
        )

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

    def _check_positions(self, positions: np.ndarray, page_ids: np.ndarray) -> None:
        limit = len(page_ids) * self.layout.page_size
        if positions.size and (positions.min() < 0 or positions.max() >= limit):
            bad = int(positions.min() if positions.min() < 0 else positions.max())
            raise UsageError(f"position {bad} lies outside the pages", f"use positions 0 to {limit - 1}")

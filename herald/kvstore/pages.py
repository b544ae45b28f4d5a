"""Which pages of the host pool are in use: a free list with reference counts."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from herald.config import check
from herald.errors import HostPoolTooSmall, UsageError


class PageAllocator:
    """Hands out page ids ``0 .. num_pages - 1``. Safe to call from several threads.

    A page is shared by counting references: `allocate` sets the count to 1, `retain` adds one, `release`
    takes one off, and at 0 the page is free again.
    """

    def __init__(self, num_pages: int) -> None:
        check(num_pages >= 1, "num_pages", num_pages, "use 1 or more")
        self.num_pages = num_pages
        self._references = np.zeros(num_pages, dtype=np.int32)
        self._num_free = num_pages
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Pages with no reference."""
        return self._num_free

    def references(self, page: int) -> int:
        """Reference count of a page."""
        return int(self._references[page])

    def count_held_once(self, among: np.ndarray) -> int:
        """Pages of ``among`` (bool [num_pages]) that have exactly one reference."""
        return int(np.count_nonzero(among & (self._references == 1)))

    def allocate(self, count: int) -> np.ndarray:
        """Take ``count`` free pages: the lowest contiguous run when there is one, else the lowest ids.

        Returns:
            int32 [count], ascending.

        Raises:
            HostPoolTooSmall: fewer pages are free (nothing is taken).
        """
        check(count >= 0, "count", count, "use 0 or more")
        with self._lock:
            if count > self._num_free:
                raise HostPoolTooSmall(
                    f"{count} pages are needed and {self._num_free} of {self.num_pages} are free",
                    f"ask for at most {self._num_free} pages or wait for requests to finish",
                )
            free = np.flatnonzero(self._references == 0)
            start = 0
            if count > 0:
                runs = np.flatnonzero(free[count - 1 :] - free[: free.size - count + 1] == count - 1)
                start = int(runs[0]) if runs.size else 0
            pages = free[start : start + count].astype(np.int32)
            self._references[pages] = 1
            self._num_free -= count
            return pages

    def retain(self, pages: ArrayLike) -> None:
        """Add a reference to every page of ``pages`` (a page named twice gets two).

        Raises:
            UsageError: a page is free or does not exist (nothing is changed).
        """
        with self._lock:
            ids, counts = self._count(pages)
            self._check_used(ids, np.ones_like(counts), "retain")
            self._references[ids] += counts

    def release(self, pages: ArrayLike) -> None:
        """Drop a reference to every page of ``pages`` (a page named twice loses two).

        Raises:
            UsageError: a page has fewer references than are dropped, or does not exist (nothing changes).
        """
        with self._lock:
            ids, counts = self._count(pages)
            self._check_used(ids, counts, "release")
            self._references[ids] -= counts
            self._num_free += int(np.count_nonzero(self._references[ids] == 0))

    def _count(self, pages: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        ids, counts = np.unique(np.asarray(pages, dtype=np.int64).reshape(-1), return_counts=True)
        if ids.size and (ids[0] < 0 or ids[-1] >= self.num_pages):
            bad = int(ids[0] if ids[0] < 0 else ids[-1])
            raise UsageError(f"page {bad} does not exist", f"use pages 0 to {self.num_pages - 1}")
        return ids, counts.astype(np.int32)

    def _check_used(self, ids: np.ndarray, counts: np.ndarray, action: str) -> None:
        short = ids[self._references[ids] < counts]
        if short.size:
            page = int(short[0])
            raise UsageError(
                f"cannot {action} page {page}: it has {self._references[page]} references",
                f"{action} only pages that are held",
            )


def page_runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Index ranges of consecutive page ids: ``[(begin, end)]`` into ``pages``."""
    if not len(pages):
        return []
    breaks = np.nonzero(np.diff(pages) != 1)[0] + 1
    edges = [0, *breaks.tolist(), len(pages)]
    return list(pairwise(edges))

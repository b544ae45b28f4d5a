"""Which finished pages can be shared: a tree of them by their tokens, evicted least recently used."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from herald.errors import UsageError
from herald.kvstore.pages import PageAllocator
from herald.kvstore.prefix_keys import FREE_PIECE, Made


@dataclass(eq=False, slots=True)
class CachedPage:
    """A finished page that requests may share. The cache holds one reference to it.

    Attributes:
        page: id in the pool.
        parent: the page before it, None for the first of a prefix.
        token_key, exact_key: see `herald.kvstore.prefix_keys`.
        made: how its rows came about.
        children: pages that follow it, in the cache.
        used: when it was last asked for; larger is later.
    """

    page: int
    parent: CachedPage | None
    token_key: bytes
    exact_key: bytes
    made: Made
    children: int = 0
    used: int = 0

    def chain(self) -> list[CachedPage]:
        """The pages up to this one, the first one first."""
        found: list[CachedPage] = []
        node: CachedPage | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class PrefixCache:
    """Finished pages of a pool, by their contents. Thread-safe.

    A page leaves when `make_room` needs it: least recently used first, never before a page that follows it,
    and never while a request or a handle has it.

    Attributes:
        evicted_pages: how many left so.
        version: changes whenever pages come or go.
    """

    def __init__(self) -> None:
        self.evicted_pages = 0
        self.version = 0
        self._allocator: PageAllocator | None = None
        self._by_exact: dict[bytes, CachedPage] = {}
        self._by_tokens: dict[bytes, list[CachedPage]] = {}
        self._pins: Counter[CachedPage] = Counter()
        self._held = np.zeros(0, dtype=bool)  # [num_pages]
        self._ticks = itertools.count(1)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._by_exact)

    @property
    def num_idle(self) -> int:
        """Pages that may leave: no request holds them, and no handle."""
        with self._lock:
            if self._allocator is None:
                return 0
            return self._allocator.count_held_once(self._held) - self._num_idle_pinned()

    @property
    def num_pinned(self) -> int:
        """Pages that handles keep."""
        with self._lock:
            return len(self._pinned())

    def attach(self, allocator: PageAllocator) -> None:
        """Work on a pool from now on; the cache must be empty.

        Raises:
            UsageError: it is not.
        """
        with self._lock:
            if self._by_exact:
                raise UsageError(
                    f"the cache holds {len(self)} pages of another pool", "clear or move it first"
                )
            self._allocator = allocator
            self._held = np.zeros(allocator.num_pages, dtype=bool)

    def move(self, allocator: PageAllocator) -> tuple[np.ndarray, np.ndarray]:
        """Take pages of another pool for those held in this one, which no request may hold.

        Returns:
            (old page ids, ascending, new page ids), int32 [n] each: the caller copies what they hold.

        Raises:
            HostPoolTooSmall: the other pool has fewer free pages (nothing is changed).
        """
        with self._lock:
            nodes = sorted(self._by_exact.values(), key=lambda node: node.page)
            old = np.array([node.page for node in nodes], dtype=np.int32)
            new = allocator.allocate(len(nodes))
            self._allocator = allocator
            self._held = np.zeros(allocator.num_pages, dtype=bool)
            self._held[new] = True
            for node, page in zip(nodes, new.tolist(), strict=True):
                node.page = page
            return old, new

    def match(
        self,
        token_keys: Sequence[bytes],
        exact_keys: Sequence[bytes],
        ends: Sequence[bool],
        kv_budget: float = 0.0,
    ) -> list[CachedPage]:
        """The longest prefix that a request can share.

        Pages that the request's own prefill would compute bit for bit, up to the last that ends a piece of
        it. Where the same tokens, computed otherwise, go on with an answer or a loaded document, those
        pages instead, unless they were decoded with fewer rows than the request asks for.

        Args:
            token_keys, exact_keys: of the request's whole pages.
            ends: whether a piece of its prefill ends with each page.
            kv_budget: of the request.
        """
        with self._lock:
            exact: list[CachedPage] = []
            for key in exact_keys:
                if (node := self._by_exact.get(key)) is None:
                    break
                exact.append(node)
            while exact and not ends[len(exact) - 1]:
                exact.pop()
            likely: list[CachedPage] = []
            for key in token_keys:
                nodes = self._by_tokens.get(key, ())
                node = next((each for each in nodes if each.made.kv_budget >= kv_budget), None)
                if node is None:
                    break
                likely.append(node)
            if len(likely) > len(exact) and any(node.made.piece == FREE_PIECE for node in likely):
                return likely
            return exact

    def acquire(
        self,
        token_keys: Sequence[bytes],
        exact_keys: Sequence[bytes],
        ends: Sequence[bool],
        kv_budget: float = 0.0,
    ) -> list[CachedPage]:
        """`match`, with a reference to each page for the caller."""
        with self._lock:
            nodes = self.match(token_keys, exact_keys, ends, kv_budget)
            if nodes:
                self._pool().retain([node.page for node in nodes])
                self._touch(nodes)
            return nodes

    def find(self, exact_key: bytes) -> CachedPage | None:
        """The page of a name; with it all before it are there."""
        with self._lock:
            return self._by_exact.get(exact_key)

    def acquire_all(
        self, token_keys: Sequence[bytes], exact_keys: Sequence[bytes]
    ) -> tuple[list[CachedPage], bool]:
        """A whole prefix, with a reference to each page for the caller.

        Returns:
            The pages of ``exact_keys`` and True, or as many as there are of the same tokens, decoded with the
            most rows, and False.
        """
        with self._lock:
            exact = [self._by_exact[key] for key in exact_keys if key in self._by_exact]
            whole = len(exact) == len(exact_keys)
            nodes = exact if whole else []
            for key in () if whole else token_keys:
                if not (found := self._by_tokens.get(key)):
                    break
                nodes.append(max(found, key=lambda node: node.made.kv_budget))
            self._pool().retain([node.page for node in nodes])
            return nodes, whole

    def add(
        self,
        pages: Sequence[int] | np.ndarray,
        token_keys: Sequence[bytes],
        exact_keys: Sequence[bytes],
        made: Sequence[Made],
    ) -> list[CachedPage]:
        """Share finished pages, all of a prefix from its first on.

        Pages whose like is there already stay the caller's alone.

        Returns:
            The cached pages of the prefix.
        """
        with self._lock:
            chain: list[CachedPage] = []
            parent: CachedPage | None = None
            fresh: list[int] = []
            for page, name, key, how in zip(pages, token_keys, exact_keys, made, strict=True):
                node = self._by_exact.get(key)
                if node is None:
                    node = CachedPage(int(page), parent, name, key, how)
                    self._by_exact[key] = node
                    self._by_tokens.setdefault(name, []).append(node)
                    fresh.append(node.page)
                    if parent is not None:
                        parent.children += 1
                chain.append(node)
                parent = node
            if fresh:
                self._pool().retain(fresh)
                self._held[fresh] = True
                self.version += 1
            self._touch(chain)
            return chain

    def touch(self, nodes: Iterable[CachedPage]) -> None:
        """They were in use until now."""
        with self._lock:
            self._touch(nodes)

    def make_room(self, count: int) -> bool:
        """Evict until ``count`` pages of the pool are free; False (and nothing done) where that cannot be."""
        with self._lock:
            pool = self._pool()
            missing = count - pool.num_free
            if missing <= 0:
                return True
            going = self._oldest(missing) if self.num_idle >= missing else []
            if len(going) < missing:
                return False
            self._evict(going)
            return True

    def pin(self, node: CachedPage) -> None:
        """Keep a page, and with it all before it, until `unpin`."""
        with self._lock:
            self._pins[node] += 1

    def unpin(self, node: CachedPage) -> None:
        """Take one `pin` back."""
        with self._lock:
            self._pins[node] -= 1
            self._pins += Counter()  # drops those at 0

    def kept_with(self, matches: Iterable[Iterable[CachedPage]]) -> int:
        """Pages that stay whatever is evicted, where these matches are held: theirs and what handles keep."""
        with self._lock:
            kept = self._pinned()
            for nodes in matches:
                kept.update(node.page for node in nodes)
            return len(kept)

    def clear(self) -> None:
        """Let go of every page, pinned ones too."""
        with self._lock:
            if self._by_exact:
                self._pool().release([node.page for node in self._by_exact.values()])
                self.version += 1
            self._by_exact.clear()
            self._by_tokens.clear()
            self._pins.clear()
            self._held[:] = False

    def _pool(self) -> PageAllocator:
        assert self._allocator is not None, "the cache is attached to no pool"
        return self._allocator

    def _touch(self, nodes: Iterable[CachedPage]) -> None:
        now = next(self._ticks)
        for node in nodes:
            node.used = now

    def _pinned(self) -> set[int]:
        kept: set[int] = set()
        for node in self._pins:
            kept.update(each.page for each in node.chain())
        return kept

    def _num_idle_pinned(self) -> int:
        """Pinned pages that no request holds."""
        return sum(self._pool().references(page) == 1 for page in self._pinned())

    def _may_leave(self, node: CachedPage) -> bool:
        return node not in self._pins and self._pool().references(node.page) == 1

    def _oldest(self, count: int) -> list[CachedPage]:
        """Up to ``count`` pages that may leave, in that order: each after all that follow it."""
        order = itertools.count()
        children: dict[CachedPage, int] = {}
        leaves = [
            (node.used, next(order), node)
            for node in self._by_exact.values()
            if node.children == 0 and self._may_leave(node)
        ]
        heapq.heapify(leaves)
        going: list[CachedPage] = []
        while leaves and len(going) < count:
            _, _, node = heapq.heappop(leaves)
            going.append(node)
            if (parent := node.parent) is not None:
                left = children[parent] = children.get(parent, parent.children) - 1
                if left == 0 and self._may_leave(parent):
                    heapq.heappush(leaves, (parent.used, next(order), parent))
        return going

    def _evict(self, nodes: list[CachedPage]) -> None:
        gone = [node.page for node in nodes]
        for node in nodes:
            self._forget(node)
        self._pool().release(gone)
        self._held[gone] = False
        self.evicted_pages += len(gone)
        self.version += 1

    def _forget(self, node: CachedPage) -> None:
        del self._by_exact[node.exact_key]
        nodes = self._by_tokens[node.token_key]
        nodes.remove(node)
        if not nodes:
            del self._by_tokens[node.token_key]
        if node.parent is not None:
            node.parent.children -= 1

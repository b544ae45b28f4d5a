"""Pages that requests share: which a request gets, and when its own can be shared.

A request looks when it is admitted, to take no more of the pool than it needs, and again when its prefill
begins: one that arrived together with another about the same document finds that document's pages then.
Prompt pages can be shared from the end of a prefill on, the pages of an answer when its request has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from herald.engine.memory import EngineMemory
from herald.engine.prefill_plan import PrefillPlan
from herald.engine.request import Request
from herald.errors import HostPoolTooSmall
from herald.kvstore import CachedPage
from herald.kvstore.prefix_keys import FREE_PIECE, Made, exact_keys, root_key, token_keys
from herald.outputs import PrefixStats


@dataclass
class PrefixNames:
    """Names of the whole pages of a prompt, see `herald.kvstore.prefix_keys`.

    Attributes:
        root: the name before the first page.
        tokens, exact: by content; by content and the way the prompt's own prefill would compute them.
        ends: whether a piece of that prefill ends with each page.
        match: what was found last, and the version of the cache it was found in.
    """

    root: bytes
    tokens: list[bytes]
    exact: list[bytes]
    ends: list[bool]
    match: tuple[int, list[CachedPage]] = field(default=(-1, []))


class SharedPrefixes:
    """Takes pages of the pool for requests, and shares them.

    Args:
        memory: of the engine.
        prefill_chunk: positions of a prefill unit.

    Attributes:
        enabled: whether anything is shared; without that requests get pages of their own.
        cache: what can be shared.
        plan: how prompts are computed.
    """

    def __init__(self, memory: EngineMemory, prefill_chunk: int) -> None:
        self.memory = memory
        self.enabled = memory.shares_prefixes
        self.cache = memory.prefixes
        self.page_size = memory.layout.page_size
        self.plan = PrefillPlan.of(prefill_chunk, self.page_size)
        self._lookups = self._hits = self._hit_tokens = 0

    @property
    def stats(self) -> PrefixStats:
        cache = self.cache
        counts = (self._lookups, self._hits, self._hit_tokens)
        return PrefixStats(*counts, cache.evicted_pages, len(cache), cache.num_pinned)

    def needed(self, request: Request) -> int:
        """Pages for all blocks the request can use, but for those it can share now."""
        return self.memory.pages_for(request.stored_positions) - len(self._match(request))

    def kept(self, requests: Iterable[Request]) -> int:
        """Pages that cannot be evicted while these requests run: those they share, and pinned ones."""
        return self.cache.kept_with(self._match(request) for request in requests) if self.enabled else 0

    def take(self, request: Request, alone: bool) -> bool:
        """Give a request its pages; False when it has to wait for some.

        Args:
            alone: no other request holds any.

        Raises:
            HostPoolTooSmall: it is alone, and pinned pages leave no room for it.
        """
        count = self.memory.pages_for(request.stored_positions)
        if not count:
            return True
        if self.memory.store is None:
            return False
        allocator = self.memory.store.pool.allocator
        shared = self._acquire(request)
        if not self.cache.make_room(count - len(shared)):
            allocator.release([node.page for node in shared])
            if not alone:
                return False
            shared = []
            if not self.cache.make_room(count):
                pinned = self.cache.num_pinned
                raise HostPoolTooSmall(
                    f"request {request.request_id} needs {count} pages, and loaded prefixes keep {pinned} of "
                    f"the {allocator.num_pages} of the host pool",
                    f"release one, or use a pool of {(count + pinned) * self.memory.layout.page_bytes} bytes",
                )
        fresh = allocator.allocate(count - len(shared))
        request.shared = shared
        request.pages = np.concatenate([_ids(shared), fresh])
        request.counters.host_kv_bytes = count * self.memory.layout.page_bytes
        return True

    def extend(self, request: Request) -> None:
        """Look again as the request's prefill begins, and give back pages that it need not fill."""
        if not self.enabled or request.pages is None or self.memory.store is None:
            return
        allocator = self.memory.store.pool.allocator
        found = self._acquire(request)
        if len(found) > len(request.shared):
            allocator.release(request.pages[: len(found)])
            request.pages = np.concatenate([_ids(found), request.pages[len(found) :]])
            request.shared = found
        else:
            allocator.release([node.page for node in found])
        cached = len(request.shared) * self.page_size
        request.counters.cached_tokens = cached
        self._lookups += 1
        self._hits += cached > 0
        self._hit_tokens += cached

    def share(self, request: Request, positions: int) -> None:
        """Share the whole pages of the first positions of a request, whose rows and codes are final.

        Callable from any thread while the request holds its pages.
        """
        names = self._names(request)
        tokens = (request.prompt_ids + request.output_ids)[:positions]
        contents = token_keys(names.root, tokens, self.page_size, names.tokens)
        shared = request.shared
        first = len(shared) * self.page_size
        made = [node.made for node in shared]
        least = min((each.kv_budget for each in made), default=1.0)
        pieces, _ = self.plan.page_pieces(first, request.first_prefix, self.page_size)
        made += [Made(piece, least) for piece in pieces]
        answer = Made(FREE_PIECE, min(least, request.offload.kv_budget))
        made += [answer] * (len(contents) - len(made))
        exact = exact_keys(names.root, contents, made, [node.exact_key for node in shared])
        assert request.pages is not None
        self.cache.add(request.pages[: len(contents)], contents, exact, made)

    def answer_span(self, request: Request) -> tuple[int, int]:
        """(first, last + 1) position of whole pages that hold something of an answer that has ended."""
        final = min(request.final_positions, len(request.prompt_ids) + len(request.output_ids))
        size = self.page_size
        return request.first_prefix // size * size, final // size * size

    def names(self, tokens: list[int], block_length: int) -> PrefixNames:
        """Names of the pages of a prompt's whole blocks that it may share.

        Where a position is predicted by the one before it, the last piece has to be computed: the first block
        begins with what comes out of it, which no page holds.
        """
        prefix = len(tokens) // block_length * block_length
        root = root_key(block_length)
        contents = token_keys(root, tokens[:prefix], self.page_size)
        pieces, ends = self.plan.page_pieces(0, prefix, self.page_size)
        exact = exact_keys(root, contents, list(map(Made, pieces)))
        count = len(contents)
        if self.memory.model.config.shifted and prefix % self.page_size == 0:
            count -= 1
        return PrefixNames(root, contents[:count], exact[:count], ends[:count])

    def _names(self, request: Request) -> PrefixNames:
        if request.prefix_names is None:
            request.prefix_names = self.names(request.prompt_ids, request.block_length)
        return request.prefix_names

    def _match(self, request: Request) -> list[CachedPage]:
        if not self.enabled or not len(self.cache):
            return []
        names, version = self._names(request), self.cache.version
        if names.match[0] != version:
            budget = request.offload.kv_budget
            names.match = version, self.cache.match(names.tokens, names.exact, names.ends, budget)
        return names.match[1]

    def _acquire(self, request: Request) -> list[CachedPage]:
        if not self.enabled or not len(self.cache):
            return []
        names = self._names(request)
        return self.cache.acquire(names.tokens, names.exact, names.ends, request.offload.kv_budget)


def _ids(nodes: list[CachedPage]) -> np.ndarray:
    return np.array([node.page for node in nodes], dtype=np.int32)

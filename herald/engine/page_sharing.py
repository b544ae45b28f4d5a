"""The work that sharing pages takes: bring a prefix's rows, share what is final, give pages back behind that.

It runs in the thread that stores and indexes rows, in its order: what a request stored is in its pages and
indexed before they are shared, and they are given back after both.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from herald.engine.layer_rows import LoadLayer
from herald.engine.memory import HostStore
from herald.engine.request import Request
from herald.engine.shared_prefix import SharedPrefixes
from herald.errors import RequestAborted
from herald.kvstore.pages import page_runs
from herald.select import BackgroundWorker
from herald.transfer import Ticket
from herald.transfer.streams import record_event


class PageSharing:
    """Pages of requests between their prefill and their end.

    Args:
        store: pool, index and transfer.
        prefixes: what is shared; None where nothing is.
        storer: thread that stores and indexes rows.
        indexers: threads that build codes.
    """

    def __init__(
        self,
        store: HostStore,
        prefixes: SharedPrefixes | None,
        storer: BackgroundWorker,
        indexers: ThreadPoolExecutor,
    ) -> None:
        self.store = store
        self.prefixes = prefixes if prefixes is not None and prefixes.enabled else None
        self._storer = storer
        self._indexers = indexers
        self._last_prompt: Future[None] | None = None
        self._ending: deque[tuple[Request, Future[Future[None]]]] = deque()

    def begin(self, request: Request) -> tuple[int, LoadLayer | None]:
        """A request's prefill begins: find what it shares.

        Returns:
            Positions at its beginning that it need not compute, and what brings their rows.
        """
        if self.prefixes is not None:
            self._settle(request)
            self.prefixes.extend(request)
        shared = len(request.shared) * self.store.layout.page_size
        return shared, partial(self._load, request) if shared else None

    def prefilled(self, request: Request) -> None:
        """All rows of a request's prompt were sent; once they are indexed, others may share them."""
        request.final_positions = request.first_prefix
        if self.prefixes is not None:
            self._last_prompt = self._storer.submit(self._share_prompt, request)

    def ends(self, request: Request, released: Future[Future[None]]) -> None:
        """A request is over; ``released`` gives what `release` returned."""
        while self._ending and _is_over(self._ending[0][1]):
            self._ending.popleft()
        self._ending.append((request, released))

    def release(self, request: Request) -> Future[None]:
        """Share the answer of a request that ended, and give its pages back, behind what it stored."""
        return self._storer.submit(self._release, request)

    def forget(self) -> None:
        """Everything submitted is done."""
        self._ending.clear()

    def _settle(self, request: Request) -> None:
        """Wait for pages on their way: those of prompts, and of answers that the request may go on with."""
        if self._last_prompt is not None:
            self._last_prompt.exception()
            self._last_prompt = None
        for other, released in list(self._ending):
            goes_on = request.prompt_ids[: len(other.prompt_ids)] == other.prompt_ids
            if goes_on and released.exception() is None:
                released.result().exception()

    def _load(self, request: Request, layer: int, rows: torch.Tensor) -> Ticket:
        """Bring a layer's rows of the pages that a request shares.

        Args:
            rows: [kv_heads, shared positions, 2 * head_dim] on the device.
        """
        assert request.pages is not None
        pages, pool = request.pages[: len(request.shared)], self.store.pool.rows[layer]
        runs = [pool[int(pages[a]) : int(pages[a]) + b - a] for a, b in page_runs(pages)]
        return self.store.transfer.load_pages(runs, rows, after=record_event(rows.device))

    def _share_prompt(self, request: Request) -> None:
        assert self.prefixes is not None
        if request.store_error is None:
            self.prefixes.share(request, request.first_prefix)

    def _release(self, request: Request) -> None:
        try:
            if self.prefixes is not None and request.pages is not None:
                self._share_answer(request)
        finally:
            if request.pages is not None:
                self.store.pool.allocator.release(request.pages)

    def _share_answer(self, request: Request) -> None:
        assert self.prefixes is not None and request.pages is not None
        ended_well = request.error is None or isinstance(request.error, RequestAborted)
        first, last = self.prefixes.answer_span(request)
        if last <= first or not ended_well or request.store_error is not None:
            return
        # Their codes were made block by block; whoever shares them gets those of whole pages, as prefill's.
        self.store.index.append_span(request.pages, first, last, executor=self._indexers)
        self.prefixes.share(request, last)


def _is_over(released: Future[Future[None]]) -> bool:
    return released.done() and (released.exception() is not None or released.result().done())

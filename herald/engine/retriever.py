"""Look-ahead retrieval: keeps the host side of every request and brings the rows a block needs.

Background threads do the CPU work: one sends what a step leaves for the host, one stores and indexes rows
that arrive from the device, one selects (two in turn where a device scores a share), one brings what was
selected, in order, one waits until it is there. A selection waits until what its request stored before is
indexed. It becomes a difference against the request's resident set, and the difference a transfer into its
staging rows, while the next selection scans; the engine applies it at a block boundary.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from herald.engine.bounce import BounceBuffers, Sent
from herald.engine.memory import HostStore
from herald.engine.page_sharing import PageSharing
from herald.engine.prefill import RowStore
from herald.engine.request import Request
from herald.engine.resident import SetUpdate
from herald.engine.shared_prefix import SharedPrefixes
from herald.engine.trace import Span, Trace
from herald.kvstore.pages import page_runs
from herald.kvstore.row_values import as_numpy
from herald.select import BackgroundWorker, SlotGeometry
from herald.transfer import RowMove, Ticket, verify_rows
from herald.transfer.streams import record_event

# Positions of a block where requests choose them.
USUAL_POSITIONS = 32


@dataclass
class Selection:
    """A selection under way.

    Attributes:
        prefix: positions it was made for.
        block: the block it is for.
        positions: int32 [layers, kv_heads, k] once chosen.
        update: the difference, once the rows are on their way.
        arrival: done once they are there, or something failed; who applies the update meets the error.
        own_rows_due: the finished block's own rows are still to be written (it is applied at a boundary).
        given_up: set once nobody wants it; what of it has not begun by then is left out.
        draft: of a look-ahead, see `staleness.draft_of`.
    """

    prefix: int
    block: int
    positions: Future[np.ndarray]
    update: Future[SetUpdate]
    arrival: Future[None]
    own_rows_due: bool
    given_up: threading.Event
    draft: list[int] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Rows have arrived (or the selection failed)."""
        return self.arrival.done()

    @property
    def arrived_at(self) -> float | None:
        """When its rows arrived, on the clock of `time.perf_counter`: now if they have not, None where no row
        had to travel."""
        if not self.ready or self.arrival.exception() is not None:
            return time.perf_counter()
        ticket = self.update.result().ticket
        span = None if ticket is None else ticket.span
        return None if span is None else span[1]


class Retriever:
    """CPU side of offloading for all requests of an engine.

    Args:
        store: pool, index, selector and transfer.
        scale: softmax scale of the model.
        trace: receives spans.
        queries: positions of a block, 0 where requests choose, and query heads: what is compiled beforehand.
        prefixes: shares the pages of finished prompts and answers; None where nothing is shared.

    Attributes:
        sharing: of pages between requests.
        arrived: set whenever rows of a selection have arrived; who waits for it clears it first.
        delay: called before each selection, in its thread, so that a test of races can stretch it.
            None in normal use.
    """

    def __init__(
        self,
        store: HostStore,
        scale: float,
        trace: Trace,
        queries: tuple[int, int],
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self.store = store
        self.scale = scale
        self.trace = trace
        self.delay: Callable[[], None] | None = None
        # Beside a device that takes layers from the back of the next selection, two may be under way.
        count = 1 if store.selector.device_scan is None else 2
        self._workers = [BackgroundWorker(f"herald-select-{i}") for i in range(count)]
        self._turns = itertools.cycle(self._workers)
        self._sender = BackgroundWorker("herald-send")
        self._storer = BackgroundWorker("herald-store")
        self._bringer = BackgroundWorker("herald-bring")
        self._receiver = BackgroundWorker("herald-receive")
        self.arrived = threading.Event()
        self._indexers = ThreadPoolExecutor(store.num_threads, thread_name_prefix="herald-index")
        self._bounce = BounceBuffers()
        self.sharing = PageSharing(store, prefixes, self._storer, self._indexers)
        for worker in self._workers:
            worker.submit(self._warm_up, *queries)

    def close(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        self._sender.close()
        for worker in self._workers:
            worker.close()
        self._bringer.close()
        self._receiver.close()
        self._storer.close()
        self._indexers.shutdown()

    def row_store(self, request: Request) -> RowStore:
        """Where a prefill that begins sends its rows, and whence it has those of pages that it shares."""
        shared, load = self.sharing.begin(request)
        return RowStore(partial(self._store_chunk, request), self.store.layout.page_size, shared, load)

    def _store_chunk(self, request: Request, layer: int, start: int, rows: torch.Tensor) -> Ticket:
        """Send a chunk of one layer's prefill KV to the request's pages and index it there.

        Args:
            start: its first position, the first of a page.
            rows: [kv_heads, c, 2 * head_dim] on the device; copied before this returns, so that the caller
                may overwrite it with later work on the same stream.
        """
        assert request.pages is not None
        size = self.store.layout.page_size
        heads, n, width = rows.shape
        whole = n // size
        pages = request.pages[start // size : -(-(start + n) // size)]
        pool = self.store.pool.rows[layer]
        # clone, not contiguous(): one page or one head would come back as a view of the caller's buffer
        paged = _copy(rows[:, : whole * size].reshape(heads, whole, size, width).transpose(0, 1))
        src, dst = [], []
        for begin, end in page_runs(pages[:whole]):
            src.append(paged[begin:end])
            dst.append(pool[int(pages[begin]) : int(pages[begin]) + end - begin])
        if n % size:
            tail = _copy(rows[:, whole * size :])
            src.extend(tail)
            dst.extend(pool[int(pages[-1]), :, : n % size])
        ticket = self.store.transfer.write_back(src, dst, after=record_event(rows.device))
        append = partial(
            self.store.index.append_span,
            request.pages,
            start,
            start + n,
            layers=(layer, layer + 1),
            executor=self._indexers,
        )
        request.stored = self._storer.submit(self._index, request, lambda: ticket, append)
        return ticket

    def store_block(self, request: Request, rows: torch.Tensor, prefix: int, after: Any) -> None:
        """Send a finished block's final KV to the pool and index it.

        Args:
            rows: [layers, kv_heads, B, 2 * head_dim], contiguous, on the device, unchanged from now on.
            prefix: positions before and in the block.
            after: event after which they are there, None on a CPU.
        """
        assert request.pages is not None
        request.final_positions = prefix
        sent = self._sender.submit(self._send, (rows,), after)
        start = prefix - request.block_length
        append = partial(self._append_block, sent, request.pages, start)
        request.stored = self._storer.submit(
            self._index, request, lambda: sent.result().ticket, append, request.block_at(start)
        )

    def _send(self, rows: tuple[torch.Tensor, ...], after: Any) -> Sent:
        """Start the copies of ``rows`` to the host."""
        return Sent(self._bounce, rows, self.store.transfer, after)

    def select(
        self,
        request: Request,
        queries: torch.Tensor,
        lse: torch.Tensor,
        block: int,
        own_rows_due: bool,
        after: Any,
    ) -> Selection:
        """Start the selection for a block of a request.

        Args:
            queries: [layers, B, heads, head_dim] of the block's lane, every position of it masked; on the
                device, unchanged from now on.
            lse: float32 [layers, B, heads], their log-sum-exps.
            block: index of the block.
            own_rows_due: see `Selection`; false for the block that is being denoised already.
            after: event after which queries and lse are there, None on a CPU.
        """
        prefix = request.prefix_of(block)
        source = (queries, lse)
        sent = self._sender.submit(self._send, source, after) if queries.is_cuda else None
        worker, given_up = next(self._turns), threading.Event()
        positions = worker.submit(
            self._choose, request, source, sent, request.stored, prefix, block, given_up
        )
        return self._ask(request, positions, prefix, block, own_rows_due, given_up)

    def rebase(self, request: Request, selection: Selection) -> Selection:
        """Compute the difference of a late selection anew, against the set as it is now."""
        again = (selection.positions, selection.prefix, selection.block)
        return self._ask(request, *again, False, selection.given_up)

    def _ask(
        self,
        request: Request,
        positions: Future[np.ndarray],
        prefix: int,
        block: int,
        own_rows_due: bool,
        given_up: threading.Event,
    ) -> Selection:
        """Have the rows at ``positions`` brought."""
        update = self._bringer.submit(self._bring, request, positions, prefix, own_rows_due, given_up)
        # Asking a ticket costs a call of the driver: a thread waits for each in turn, and nobody asks.
        arrival = self._receiver.submit(_receive, update)
        arrival.add_done_callback(lambda _: self.arrived.set())
        return Selection(prefix, block, positions, update, arrival, own_rows_due, given_up)

    def retire(self, request: Request) -> None:
        """Give back a request's pages and rows once nothing on its way can touch them any more."""
        self.sharing.ends(request, self._bringer.submit(self._release, request))

    def drain(self) -> None:
        """Wait for everything submitted so far."""
        for worker in (
            self._sender,
            self._storer,
            *self._workers,
            self._bringer,
            self._receiver,
            self._storer,
        ):
            worker.submit(lambda: None).result()
        self.sharing.forget()

    def _warm_up(self, positions: int, heads: int) -> None:
        """Compile what a selection runs while the first prompt is prefilled, not at its first boundary."""
        layout = self.store.layout
        shape = (layout.num_layers, layout.num_kv_heads)
        page, one = np.zeros(1, dtype=np.int32), np.zeros((*shape, 1), dtype=np.int32)
        queries = np.zeros((shape[0], 1, shape[1], layout.head_dim), dtype=np.float32)
        selector = self.store.selector
        selector.select(page, 0, layout.page_size, 1, queries, queries[..., 0], self.scale)
        selector.plan_update(one, 1, one, 0, 1, 1, page, 0, False, SlotGeometry(1, 0, 1, 0))
        if selector.device_scan is not None:
            selector.device_scan.warm_up(positions or USUAL_POSITIONS, heads // layout.num_kv_heads)

    def _release(self, request: Request) -> Future[None]:
        """Give rows back, and have the pages given back behind what the request stored."""
        selections, request.selection = [*request.missed, request.selection], None
        try:
            for selection in selections:
                if selection is not None and selection.update.exception() is None:
                    ticket = selection.update.result().ticket
                    if ticket is not None:
                        with suppress(Exception):  # the request is over: nobody is left to tell
                            ticket.wait_host()
        finally:
            released = self.sharing.release(request)
            if request.resident is not None:
                request.resident.release()
        return released

    def _choose(
        self,
        request: Request,
        source: tuple[torch.Tensor, ...],
        sent: Future[Sent] | None,
        stored: Future[None] | None,
        prefix: int,
        block: int,
        given_up: threading.Event,
    ) -> np.ndarray:
        """Choose rows with queries and lse, from ``source`` or where they were ``sent``."""
        with nullcontext(source) if sent is None else sent.result().arrived() as host:
            if stored is not None:
                stored.result()
            if request.store_error is not None:
                raise request.store_error
            if self.delay is not None:
                self.delay()
            if given_up.is_set():
                raise CancelledError
            return self._scan(request, host, prefix, block)

    def _scan(self, request: Request, host: tuple[torch.Tensor, ...], prefix: int, block: int) -> np.ndarray:
        assert request.resident is not None and request.pages is not None
        start = time.perf_counter()
        first, last, k = request.resident.candidates(prefix)
        queries = host[0].float() if host[0].dtype == torch.float16 else host[0]
        positions = self.store.selector.select(
            request.pages, first, last, k, as_numpy(queries), host[1].numpy(), self.scale
        )
        end = time.perf_counter()
        scanned = self.store.selector.bytes_scanned(first, last, k)
        at = (request.request_id, block)
        self.trace.add(Span("selection", start, end, *at, rows=positions.size, bytes=scanned))
        request.counters.selection_seconds += end - start
        request.counters.rows_selected += positions.size
        return positions

    def _bring(
        self,
        request: Request,
        positions: Future[np.ndarray],
        prefix: int,
        own_rows_due: bool,
        given_up: threading.Event,
    ) -> SetUpdate:
        """Difference against the resident set, and the transfer of what is missing."""
        resident = request.resident
        assert resident is not None and request.pages is not None
        chosen = positions.result()
        if given_up.is_set():
            raise CancelledError
        first, last, _ = resident.candidates(prefix)
        version, length, held = resident.snapshot()
        due = request.block_length if own_rows_due else 0
        plan = self.store.selector.plan_update(
            held,
            length,
            chosen,
            first,
            last,
            prefix - due,
            request.pages,
            due,
            not self.store.config.difference_only,
            resident.geometry,
        )
        moved = len(plan.src_rows)
        if moved == 0:
            return SetUpdate(version, plan, None)
        move = RowMove(plan.src_rows, plan.staging_rows, plan.slot_rows)
        ticket = self.store.transfer.submit(move)
        request.counters.rows_moved += moved
        request.counters.bytes_moved += moved * self.store.layout.row_bytes
        return SetUpdate(version, plan, ticket)

    def verify(self, request: Request, update: SetUpdate) -> None:
        """Compare staged rows with their source (checksum mode).

        Raises:
            TransferCorrupted: a row differs.
        """
        if update.ticket is None or request.resident is None:
            return
        update.ticket.wait_host()
        move = RowMove(update.plan.src_rows, update.plan.staging_rows)
        verify_rows(move, self.store.pool.flat_rows, request.resident.arena.flat_rows)

    def _index(
        self, request: Request, sent: Callable[[], Ticket], append: Callable[[], None], block: int = -1
    ) -> None:
        """Index rows that a ticket brings to the host. Nobody waits for this job: an error is kept."""
        try:
            ticket = sent()
            ticket.wait_host()
            if (span := ticket.span) is not None:
                at = (request.request_id, block)
                self.trace.add(Span("write_back", *span, *at, bytes=ticket.bytes))
            with self.trace.span("index", request.request_id, block):
                append()
        except BaseException as error:
            request.store_error = error

    def _append_block(self, sent: Future[Sent], pages: np.ndarray, start: int) -> None:
        """Store and index a block's rows from position ``start`` on; it may go over the end of a page."""
        size, done = self.store.layout.page_size, 0
        with sent.result().arrived() as (buffer,):
            while done < buffer.shape[2]:
                page, offset = divmod(start + done, size)
                count = min(size - offset, buffer.shape[2] - done)
                self.store.pool.write_block(int(pages[page]), offset, buffer[:, :, done : done + count])
                self.store.index.append_block(int(pages[page]), offset, count)
                done += count


def _receive(update: Future[SetUpdate]) -> None:
    """Return when the rows of an update are there."""
    ticket = update.result().ticket
    if ticket is not None:
        ticket.wait_host()


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format)

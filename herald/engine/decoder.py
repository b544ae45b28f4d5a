"""One decode step: lanes in, commits out. What runs in it, and in which order, for all ready requests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from herald.decode import draw, quota
from herald.engine.lanes import Lane
from herald.engine.request import Request
from herald.engine.resident import SetUpdate
from herald.engine.retriever import Retriever, Selection
from herald.engine.runner import LaneRunner
from herald.engine.trace import Span, Trace
from herald.errors import HeraldError, NonFiniteLogits, RetrievalFailed
from herald_kernels import commit, greedy_confidence


@dataclass
class StepLanes:
    """Indices of a request's lanes in a forward."""

    block: int
    final: int = -1
    lookahead: int = -1
    own: bool = False  # the block's own queries are captured (a late selection)

    @property
    def looks_ahead(self) -> bool:
        """Draft and next block run along."""
        return self.lookahead >= 0 and not self.own

    @property
    def count(self) -> int:
        """The request's lanes."""
        return 1 + (self.final >= 0) + 2 * self.looks_ahead


class Decoder:
    """Runs denoising steps.

    Args:
        runner: forwards.
        retriever: look-ahead retrieval, None without offload.
        trace: receives spans.
    """

    def __init__(self, runner: LaneRunner, retriever: Retriever | None, trace: Trace) -> None:
        self.runner = runner
        self.model = runner.model
        self.retriever = retriever
        self.trace = trace

    def ready(self, request: Request) -> bool:
        """Whether a step of the request could run now without waiting for its selection."""
        selection = request.selection
        if request.closed is None or selection is None or selection.ready:
            return True
        assert request.resident is not None
        return request.resident.config.on_late == "proceed"

    def step(self, requests: list[Request]) -> None:
        """One denoising step of every request, all of one block length, each at its own step.

        A request whose rows cannot be brought gets its `error` and takes no part.
        """
        free = {id(r): self._begin_or_fail(r) for r in requests}
        requests = [r for r in requests if r.error is None]
        if not requests:
            return
        lanes: list[Lane] = []
        plans = [self._lanes(request, lanes) for request in requests]
        start = time.perf_counter()
        result = self.runner.forward(lanes)
        for request, plan in zip(requests, plans, strict=True):
            if plan.final >= 0:
                self._keep_final(request, result.final_rows[plan.final], free[id(request)])
            if plan.lookahead >= 0 and self.retriever is not None:
                capture = result.captures[plan.lookahead]
                block = request.block if plan.own else request.block + 1
                request.selection = self.retriever.select(request, capture, block, own_rows_due=not plan.own)
                request.counters.lookaheads += not plan.own
        self.commit(requests, [result.logits[plan.block] for plan in plans])
        end = time.perf_counter()
        for request, plan in zip(requests, plans, strict=True):
            at = (request.request_id, request.block, request.step - 1)  # `commit` has counted the step
            self.trace.add(Span("forward", start, end, *at, lanes=plan.count, lookahead=plan.looks_ahead))

    def commit(self, requests: list[Request], logits: list[torch.Tensor]) -> None:
        """Fix tokens of every request's block from ``logits`` (a list of [B, vocab])."""
        block = requests[0].block_length
        stacked = torch.stack(logits)
        token, confidence = greedy_confidence(stacked.view(-1, stacked.shape[-1]))
        best = token.view(len(requests), block)
        confidence = confidence.view(len(requests), block).clone()
        candidate = best.clone()
        for i, request in enumerate(requests):
            if request.params.temperature > 0:
                assert request.generator is not None
                candidate[i], confidence[i] = draw(logits[i], request.params, request.generator)
        tokens = torch.stack([_tensor(r.tokens) for r in requests])
        masked = torch.stack([_tensor(r.masked) for r in requests])
        device = tokens.device
        quotas = [_quota(r) for r in requests]
        limits = [r.params.confidence_threshold for r in requests]
        thresholds = [float("inf") if limit is None else limit for limit in limits]
        status = commit(
            tokens,
            masked,
            candidate,
            confidence,
            torch.tensor(quotas, dtype=torch.int32).to(device),
            torch.tensor(thresholds, dtype=torch.float32).to(device),
        )
        drafts = torch.where(masked, best, tokens)
        left = status.tolist()
        for i, request in enumerate(requests):
            request.tokens, request.masked, request.draft = tokens[i], masked[i], drafts[i]
            request.step += 1
            request.counters.steps += 1
            request.counters.forwards += 1
            if left[i] < 0:
                request.error = NonFiniteLogits(
                    f"request {request.request_id}: NaN or infinite logits in block {request.block}",
                    "check the weights, or use dtype='float32'",
                )

    def _begin_or_fail(self, request: Request) -> SetUpdate | None:
        """`_begin`; an error of the request's retrieval becomes the request's, not the batch's."""
        try:
            return self._begin(request)
        except HeraldError as error:
            request.error = error
        except Exception as error:
            request.error = RetrievalFailed(
                f"request {request.request_id}: no rows could be brought for block {request.block} ({error})",
                "see the chained error; run with verify_transfers=True to find a damaged row",
            )
            request.error.__cause__ = error
        return None

    def _begin(self, request: Request) -> SetUpdate | None:
        """Bring the resident set up to date before a step; at a block's begin, find its slots.

        Returns:
            At a block's begin, the update whose ``free_slots`` take the finished block's rows.
        """
        if self.retriever is None:
            return None
        if request.closed is None:
            self._apply_late(request)
            return None
        assert request.resident is not None
        if not request.resident.needs_selection(request.prefix):
            return None
        selection = request.selection
        if selection is not None and selection.block < request.block and selection.ready:
            selection = request.selection = None  # it missed its block
        if request.resident.config.on_late == "proceed" and (selection is None or not selection.ready):
            request.counters.late_selections += 1
            return None
        if selection is None:
            selection = self._select_at_boundary(request)
        update = self._await(request, selection)
        self._apply(request, update)
        return update

    def _apply_late(self, request: Request) -> None:
        """Apply a selection that missed its block's begin (``on_late="proceed"``)."""
        selection = request.selection
        if selection is None or selection.block > request.block or not selection.ready:
            return
        assert self.retriever is not None and request.resident is not None
        if selection.block < request.block:
            request.selection = None
            return
        update = selection.update.result()
        if selection.own_rows_due or update.version != request.resident.version:
            request.selection = self.retriever.rebase(request, selection)
            return
        self._apply(request, update)

    def _select_at_boundary(self, request: Request) -> Selection:
        """No look-ahead ran: select with the finished block's tokens, all of it exposed."""
        assert self.retriever is not None and request.resident is not None and request.closed is not None
        start = time.perf_counter()
        first = request.prefix - request.block_length
        lanes = [
            Lane(request.resident, request.closed, first),
            Lane(request.resident, _tensor(request.tokens), request.prefix, parent=0, capture=True),
        ]
        capture = self.runner.forward(lanes).captures[1]
        at = (request.request_id, request.block)
        self.trace.add(Span("forward", start, time.perf_counter(), *at, lanes=len(lanes)))
        request.counters.forwards += 1
        request.counters.boundary_selections += 1
        selection = self.retriever.select(request, capture, request.block, own_rows_due=True)
        selection.update.exception()
        end = time.perf_counter()
        request.counters.exposed_seconds += end - start
        self.trace.add(Span("wait", start, end, *at))
        return selection

    def _await(self, request: Request, selection: Selection) -> SetUpdate:
        """Block until the rows are there; what that takes is exposed time."""
        start = time.perf_counter()
        update = selection.update.result()
        if update.ticket is not None:
            update.ticket.wait_host()
        end = time.perf_counter()
        request.counters.exposed_seconds += end - start
        self.trace.add(Span("wait", start, end, request.request_id, request.block))
        return update

    def _apply(self, request: Request, update: SetUpdate) -> None:
        """Put an update's rows into their slots, and count how long they travelled."""
        assert self.retriever is not None and request.resident is not None
        if update.ticket is not None:
            request.counters.transfer_seconds += update.ticket.seconds or 0.0
            span = update.ticket.span
            if span is not None:
                at = (request.request_id, request.block)
                self.trace.add(Span("transfer", *span, *at, rows=update.moved, bytes=update.ticket.bytes))
        verify = request.resident.config.verify_transfers
        check = partial(self.retriever.verify, request, update) if verify else None
        request.resident.apply(update, check)
        request.selected_block = request.block
        request.selection = None

    def _lanes(self, request: Request, lanes: list[Lane]) -> StepLanes:
        """Append the request's lanes of this step to ``lanes``."""
        assert request.resident is not None
        resident, tokens = request.resident, _tensor(request.tokens)
        final = parent = -1
        if request.closed is not None:
            final = parent = len(lanes)
            lanes.append(Lane(resident, request.closed, request.prefix - request.block_length, final=True))
        own = self._selects_late(request)
        plan = StepLanes(block=len(lanes), final=final, own=own)
        lanes.append(Lane(resident, tokens, request.prefix, parent=parent, logits=True, capture=own))
        if own:
            plan.lookahead = plan.block
        elif self._looks_ahead(request):
            draft, at = _tensor(request.draft), len(lanes)
            lanes.append(Lane(resident, draft, request.prefix))
            masks = torch.full_like(draft, self.model.config.mask_token_id)
            plan.lookahead = at + 1
            lanes.append(
                Lane(resident, masks, request.prefix + request.block_length, parent=at, capture=True)
            )
        return plan

    def _looks_ahead(self, request: Request) -> bool:
        """Whether the look-ahead for the next block runs in this step."""
        if self.retriever is None or request.selection is not None:
            return False
        assert request.resident is not None
        config = request.resident.config
        due = request.closed is None and request.step >= config.lookahead_step
        more = request.block < request.last_block
        return due and more and request.resident.needs_selection(request.prefix + request.block_length)

    def _selects_late(self, request: Request) -> bool:
        """Whether this step's own queries select for the block itself (``on_late="proceed"``)."""
        if self.retriever is None or request.closed is None or request.selection is not None:
            return False
        assert request.resident is not None
        return request.selected_block != request.block and request.resident.needs_selection(request.prefix)

    def _keep_final(self, request: Request, rows: torch.Tensor, update: SetUpdate | None) -> None:
        """The finished block's KV goes to its slots and to the host pool."""
        assert request.resident is not None
        if update is None:
            free = request.resident.slots_without_selection(request.prefix)
        else:
            free = update.free_slots
        request.resident.append_block(rows, free, request.prefix)
        request.closed = None
        if self.retriever is not None:
            self.retriever.store_block(request, rows, request.prefix)


def _quota(request: Request) -> int:
    """Positions that the request's next step commits at least."""
    shares = quota(request.block_length, request.params.denoising_steps)
    return shares[min(request.step, len(shares) - 1)]


def _tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value

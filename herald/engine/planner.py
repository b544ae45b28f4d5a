"""What each request does in the next step: its lanes, the rows it brings first, the selections it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from herald.engine.blocks import BlockTable
from herald.engine.failures import retrieval_error
from herald.engine.lanes import StepPlan
from herald.engine.request import Phase, Request
from herald.engine.resident import Arrived, ResidentSet, SetUpdate, put_rows
from herald.engine.retriever import Retriever, Selection
from herald.engine.selection_clock import SelectionClock, SelectionTimes
from herald.engine.staleness import draft_of, draft_was_wrong, follows_many_commits
from herald.engine.trace import Span, Trace


@dataclass(slots=True)
class Part:
    """A request's part in a step.

    Attributes:
        block, step: what is denoised; step -1 for a forward that only selects.
        lanes: how many it has.
        final: the block before is final in this step.
        lead: the block before predicts the block's first token in this step, and nothing else is committed.
        free_rows: int64, flat arena rows where the rows of that block go, None for those that follow the set.
        captures: the block whose selection gets the queries of a lane, -1 for none.
        own_rows_due: see `Selection`.
        times: of that selection, where they are measured.
    """

    request: Request
    block: int
    step: int
    lanes: int = 0
    final: bool = False
    lead: bool = False
    free_rows: np.ndarray | None = None
    captures: int = -1
    own_rows_due: bool = True
    times: SelectionTimes | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether look-ahead lanes for the next block are among its lanes."""
        return self.step >= 0 and self.captures > self.block


class StepPlanner:
    """Plans steps, and applies what was selected before them.

    Args:
        retriever: look-ahead retrieval, None without offload.
        trace: receives spans.

    Attributes:
        clock: measures, and decides when look-aheads run, with ``lookahead="late"``; None for a fixed step.
    """

    def __init__(self, retriever: Retriever | None, trace: Trace) -> None:
        self.retriever = retriever
        self.trace = trace
        self.clock: SelectionClock | None = None
        self._batch = 0
        self._arrived: list[Arrived] = []

    def plan(self, requests: list[Request], table: BlockTable) -> tuple[StepPlan, list[Part]]:
        """Lanes of all requests; those whose rows cannot be brought are left out, with their `error`."""
        plan, parts = StepPlan(), []
        self._batch, self._arrived = len(requests), []
        looks_left = max(4, -(-len(requests) // 4))  # look-aheads are spread over steps
        late = self._late_looks(requests)
        for request in requests:
            if request.is_plain and not late.get(request, False):
                parts.append(self._plan_plain(request, table, plan))
                continue
            try:
                part = self._plan_request(request, table, plan, late.get(request, looks_left > 0))
            except Exception as error:
                request.error = retrieval_error(request, error)
            else:
                looks_left -= part.captures >= 0
                parts.append(part)
        put_rows(self._arrived)
        return plan, parts

    def _plan_plain(self, request: Request, table: BlockTable, plan: StepPlan) -> Part:
        """Add the lane of a step that only denoises."""
        resident = request.resident
        assert resident is not None
        source = table.tokens_row(request.slot)
        lane = _add_lane(plan, resident, source, request.prefix)
        plan.add_block(lane, request.slot, False, request.step_quota)
        part = Part(request, request.block, request.step, lanes=1)
        count_down(request)
        return part

    def submitted(self, part: Part) -> None:
        """The selection of a part's queries was submitted."""
        selection = part.request.selection
        if selection is not None and part.looks_ahead:
            selection.draft = draft_of(part.request)
        if self.clock is not None and selection is not None:
            part.times = part.request.times = self.clock.submitted(selection)

    def ran(self, parts: list[Part], start: float, end: float) -> None:
        """A step ran from ``start`` to ``end``, in seconds on the clock of `time.perf_counter`."""
        if self.clock is None:
            return
        if any(part.step >= 0 for part in parts):
            self.clock.lookahead.step_took(end - start)
        for part in parts:
            if part.times is not None:
                self.clock.asked(part.times, end)

    def _late_looks(self, requests: list[Request]) -> dict[Request, bool]:
        """Whether each request whose look-ahead can wait looks ahead now; a fixed step decides for others."""
        if self.clock is None or not self.clock.lookahead.measured:
            return {}
        able, to_come = [], []
        for request in requests:
            if request.left > 0 and (self.looks_ahead(request) or self._refresh_lands(request)):
                steps = request.steps_to_come
                if steps is not None:
                    able.append(request)
                    to_come.append(steps)
        under_way = max((request.unread for request in able), default=0)
        looks = self.clock.lookahead.due(to_come, self.clock.queued, self.clock.running, under_way)
        return dict(zip(able, looks, strict=True))

    def _plan_request(self, request: Request, table: BlockTable, plan: StepPlan, may_look: bool) -> Part:
        """Add the request's lanes of the next step; at a block's begin, bring its rows first."""
        resident = request.resident
        assert resident is not None
        opening = request.left == 0
        prefix = request.prefix + request.block_length if opening else request.prefix
        update, free_rows = None, None
        if opening:
            self._drop_missed(request)
            if self.selects_at_boundary(request, prefix):
                return self._plan_boundary_selection(request, table, plan)
            update = self._update_of(request, prefix)
            if update is not None:
                self._apply(request, update, request.block + 1)
                free_rows = update.plan.free_rows
            elif resident.needs_selection(prefix):
                free_rows = resident.slide_window(prefix)
            request.block += 1
            request.step = 0
            request.left = request.whole
        elif self._selects_first(request):
            return self._plan_own_selection(request, table, plan)
        elif resident.config.refresh_step == 0 or self._refresh_lands(request):
            self._apply_late(request)
        if request.waits_since is not None:
            self._count_wait(request, request.block)
        part = Part(request, request.block, request.step, final=opening, free_rows=free_rows)
        slot, first, parent = request.slot, plan.num_lanes, -1
        add = partial(_add_lane, plan, resident)
        if opening:
            parent = add(table.closed_row(slot), prefix - request.block_length, final=True)
            plan.final_lane.append(parent)
        if opening and request.leads:
            return self._plan_lead(part, plan, parent)
        own = add(table.tokens_row(slot), prefix, parent)
        plan.add_block(own, slot, opening, request.step_quota)
        if self._selects_late(request) or self._refreshes(request):
            plan.capture_lane.append(own)
            part.captures, part.own_rows_due = request.block, False
        elif may_look and not opening and self.looks_ahead(request):
            context = own
            if resident.config.lookahead_context == "draft":
                context = add(table.draft_row(slot), prefix, final=True)
            masks = add(table.fresh_row(slot), prefix + request.block_length, context)
            plan.capture_lane.append(masks)
            part.captures = request.block + 1
        part.lanes = plan.num_lanes - first
        request.plain_until = self._plain_until(request, part.captures >= 0)
        count_down(request)
        return part

    def _plan_lead(self, part: Part, plan: StepPlan, final_lane: int) -> Part:
        """Have the final lane of the block before commit the block's first token."""
        request = part.request
        plan.add_block(final_lane, request.slot, True, 1)
        part.lanes, part.lead = 1, True
        request.plain_until = self._plain_until(request, False)
        count_down(request)
        return part

    def _plain_until(self, request: Request, captures: bool) -> int:
        """The step of the block from which one may again be more than denoising; see `Request`."""
        assert request.resident is not None
        config, selection = request.resident.config, request.selection
        if self.retriever is not None and config.refresh_commits and not request.is_certain:
            return 0
        if self.retriever is None or (selection is not None and selection.block > request.block):
            return max(request.block_length, request.whole)
        if captures or config.on_late == "proceed" or config.refresh_step:
            return 0
        more = request.block < request.last_block
        if more and request.resident.needs_selection(request.prefix + request.block_length):
            return max(config.lookahead_step, self._step_before_look(request))
        return max(request.block_length, request.whole)

    def _step_before_look(self, request: Request) -> int:
        """A step of the block before which a late look-ahead is not due; 0 where that is not known."""
        if self.clock is None or not self.clock.lookahead.measured or not request.is_certain:
            return 0
        needed = self.clock.lookahead.steps_needed(self._batch + self.clock.queued)
        return request.step + (request.steps_to_come or 0) - needed

    def selects_at_boundary(self, request: Request, prefix: int) -> bool:
        """No look-ahead ran for the next block, and it cannot begin without a selection."""
        assert request.resident is not None
        selection, config = request.selection, request.resident.config
        if self.retriever is None or config.on_late == "proceed" or selection is not None:
            return False
        return request.resident.needs_selection(prefix)

    def _plan_boundary_selection(self, request: Request, table: BlockTable, plan: StepPlan) -> Part:
        """Lanes that select with the finished block's tokens; what that takes is exposed."""
        assert request.resident is not None
        if request.waits_since is None:
            request.waits_since = time.perf_counter()
        request.counters.boundary_selections += 1
        add, slot = partial(_add_lane, plan, request.resident), request.slot
        closed = add(table.tokens_row(slot), request.prefix, final=True)
        masks = add(table.fresh_row(slot), request.prefix + request.block_length, closed)
        plan.capture_lane.append(masks)
        return Part(request, request.block, -1, lanes=2, captures=request.block + 1)

    def _plan_own_selection(self, request: Request, table: BlockTable, plan: StepPlan) -> Part:
        """The block's lane, which only selects for the step that comes; what that takes is exposed."""
        assert request.resident is not None
        if request.selection is not None:
            self._give_up(request, request.selection)
        request.selected_in = (request.block, request.step)
        if request.waits_since is None:
            request.waits_since = time.perf_counter()
        own = _add_lane(plan, request.resident, table.tokens_row(request.slot), request.prefix)
        plan.capture_lane.append(own)
        return Part(request, request.block, -1, lanes=1, captures=request.block, own_rows_due=False)

    def _update_of(self, request: Request, prefix: int) -> SetUpdate | None:
        """The rows of the block that begins, None where the set only grows or the rows are late."""
        assert request.resident is not None
        if self.retriever is None or not request.resident.needs_selection(prefix):
            return None
        selection = request.selection
        if selection is None or selection.block <= request.block or not selection.ready:
            request.counters.late_selections += 1
            return None
        return selection.update.result()

    def _drop_missed(self, request: Request) -> None:
        """Forget a selection for the block that ends, which came too late or was to land in a later step, and
        a look-ahead that took too much of that block for other tokens."""
        selection = request.selection
        if selection is None or (selection.block > request.block and not draft_was_wrong(request)):
            return
        assert request.resident is not None
        if request.resident.config.on_late == "wait" or selection.ready:
            self._give_up(request, selection)

    def _refreshes(self, request: Request) -> bool:
        """Whether this step's own queries select for the block anew."""
        assert request.resident is not None
        config = request.resident.config
        if self.retriever is None or not config.refresh_step or request.step != config.refresh_step:
            return False
        more = request.left > request.step_quota
        return more and request.selection is None and request.resident.needs_selection(request.prefix)

    def _selects_first(self, request: Request) -> bool:
        """Whether the step has to wait for rows that its own queries choose, whatever else is under way."""
        assert request.resident is not None
        selection = request.selection
        if self.retriever is None or (selection is not None and selection.block == request.block):
            return False
        return follows_many_commits(request) and request.resident.needs_selection(request.prefix)

    def _refresh_lands(self, request: Request) -> bool:
        """Whether a refresh is due in the next step."""
        assert request.resident is not None
        config, selection = request.resident.config, request.selection
        due = config.refresh_step and request.step >= config.refresh_step + config.refresh_lag
        due = due or request.selected_in == (request.block, request.step)
        return bool(due) and selection is not None and selection.block == request.block

    def _apply_late(self, request: Request) -> None:
        """Apply a selection within its block: a refresh, or one that missed the begin (``"proceed"``)."""
        selection = request.selection
        if selection is None or selection.block > request.block or not selection.ready:
            return
        assert self.retriever is not None and request.resident is not None
        if selection.block < request.block:
            self._give_up(request, selection)
            return
        update = selection.update.result()
        if selection.own_rows_due or update.version != request.resident.version:
            request.selection = self.retriever.rebase(request, selection)
            return
        self._apply(request, update, request.block)

    def _give_up(self, request: Request, selection: Selection) -> None:
        """Forget a selection that is no longer wanted; its rows may still be on the way."""
        selection.given_up.set()
        request.missed = [missed for missed in request.missed if not missed.ready] + [selection]
        request.selection = None
        self._note_arrival(request, selection.arrived_at)

    def _note_arrival(self, request: Request, at: float | None) -> None:
        if self.clock is not None and request.times is not None:
            self.clock.arrived(request.times, at)
        request.times = None

    def _apply(self, request: Request, update: SetUpdate, block: int) -> None:
        """Take an update's rows, which go into their slots with those of others, and count how long they
        travelled."""
        assert self.retriever is not None and request.resident is not None
        span = None if update.ticket is None else update.ticket.span
        self._note_arrival(request, None if span is None else span[1])
        if update.ticket is not None:
            request.counters.transfer_seconds += update.ticket.seconds or 0.0
            if span is not None:
                moved = len(update.plan.src_rows)
                at = (request.request_id, block)
                self.trace.add(Span("transfer", *span, *at, rows=moved, bytes=update.ticket.bytes))
        verify = request.resident.config.verify_transfers
        check = partial(self.retriever.verify, request, update) if verify else None
        if (arrived := request.resident.accept(update, check)) is not None:
            self._arrived.append(arrived)
        request.selected_block = block
        request.selection = None

    def _count_wait(self, request: Request, block: int) -> None:
        """The request's rows are there: what it waited for them was exposed."""
        start, end = request.waits_since, time.perf_counter()
        request.waits_since = None
        if start is not None:
            request.counters.exposed_seconds += end - start
            self.trace.add(Span("wait", start, end, request.request_id, block))

    def looks_ahead(self, request: Request) -> bool:
        """Whether the look-ahead for the next block runs in this step."""
        if self.retriever is None or request.selection is not None:
            return False
        assert request.resident is not None
        config = request.resident.config
        first = config.refresh_step + config.refresh_lag if config.refresh_step else 0
        due = request.step >= max(config.lookahead_step, first)
        more = request.block < request.last_block
        return due and more and request.resident.needs_selection(request.prefix + request.block_length)

    def _selects_late(self, request: Request) -> bool:
        """Whether the block's own queries select for it, in its first step (``on_late="proceed"``)."""
        if self.retriever is None or request.step > 0 or request.selection is not None:
            return False
        assert request.resident is not None
        return request.selected_block != request.block and request.resident.needs_selection(request.prefix)

    def waits_for_rows(self, request: Request) -> bool:
        """Whether the request's next step has to wait for a selection that is under way."""
        selection = request.selection
        if selection is None or request.phase is not Phase.DECODE or selection.ready:
            return False
        assert request.resident is not None
        if request.left > 0:
            return self._refresh_lands(request)
        waits = request.resident.config.on_late == "wait" and selection.block > request.block
        return waits and not draft_was_wrong(request)


def _add_lane(
    plan: StepPlan, resident: ResidentSet, source: int, position: int, parent: int = -1, final: bool = False
) -> int:
    """Add a lane that attends to a set; returns its index."""
    start, length = resident.row_start, resident.length
    return plan.add_lane(source, position, start, length, parent, resident.window_start, final)


def count_down(request: Request) -> None:
    """Take what the step that is planned will commit from the masks left, where that is known."""
    if request.is_certain:
        request.left -= request.commits(request.left, request.step)

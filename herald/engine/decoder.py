"""Decode steps: what is launched when, and what is read back.

A step is launched without waiting for the one before it where the host knows what that one will do: how
many positions it commits (no threshold), and that its request goes on. Two steps may be under way, and more
where they are short and alike: the host then wakes up once for several of them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from herald.decode import DecodePolicy, Noise, draw, policy_of, uniform_noise
from herald.engine.blocks import BlockTable
from herald.engine.failures import retrieval_error
from herald.engine.lanes import StepPlan, StepShape
from herald.engine.noise_table import NoiseTable
from herald.engine.plain_step import PlainStep
from herald.engine.planner import Part, StepPlanner, count_down
from herald.engine.program import StepProgram
from herald.engine.reports import ReportPool, StepReport
from herald.engine.request import Request
from herald.engine.retriever import Retriever
from herald.engine.runner import LaneRunner
from herald.engine.trace import ForwardPart, Trace
from herald.transfer.streams import record_event

# Steps that may be under way when another one is asked for.
MAX_UNDER_WAY = 2
# The same where all of them only denoise, and how long they may take together: an abort or a new request
# waits for them.
MAX_AHEAD = 4
AHEAD_SECONDS = 0.025


@dataclass(slots=True)
class Step:
    """A step that was launched. The parts that denoise have the rows of its report, in order.

    Attributes:
        goes_on: it only denoises, and finishes no block.
    """

    parts: list[Part]
    report: StepReport
    goes_on: bool = False


class Kept(NamedTuple):
    """What a step leaves for the host: see `StepProgram`; one entry for each lane that is kept.

    ``after`` is an event after which it is there, None on a CPU.
    """

    rows: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    after: Any = None


class Decoder:
    """Launches denoising steps.

    Args:
        runner: programs of steps.
        retriever: look-ahead retrieval, None without offload.
        trace: receives spans.
        max_num_seqs: requests that decode at the same time.

    Attributes:
        planner: what each request does in a step.
        noise: of the canvases that begin from now on; replaced to give them known tokens.
    """

    def __init__(
        self, runner: LaneRunner, retriever: Retriever | None, trace: Trace, max_num_seqs: int
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.planner = StepPlanner(retriever, trace)
        self.noise: Noise = uniform_noise
        self.trace = trace
        self.max_num_seqs = max_num_seqs
        self.under_way: deque[Step] = deque()
        self._plain: dict[int, PlainStep] = {}
        self._step_seconds = AHEAD_SECONDS
        self._tables: dict[int, BlockTable] = {}
        self._reports = ReportPool(self.model.device)

    def table(self, block_length: int) -> BlockTable:
        """The blocks under way of one length."""
        if block_length not in self._tables:
            count, config, device = self.max_num_seqs, self.model.config, self.model.device
            if config.noise is not None:
                table: BlockTable = NoiseTable(block_length, count, self.model, self.noise)
            else:
                policy = policy_of(config.family)
                sub_blocks = isinstance(policy, DecodePolicy) and policy.sub_block_length > 0
                windowed = config.shifted or sub_blocks
                table = BlockTable(block_length, count, config.mask_token_id, device, windowed)
            self._tables[block_length] = table
        return self._tables[block_length]

    def has_room(self, group: list[Request], alone: bool) -> bool:
        """Whether another step may be under way.

        Args:
            group: requests that decode, of one block length; the step would be theirs.
            alone: no other request decodes, prefills or waits.
        """
        count = len(self.under_way)
        if count < MAX_UNDER_WAY:
            return True
        if not alone or count + 1 > min(MAX_AHEAD, AHEAD_SECONDS / self._step_seconds):
            return False
        again = self._plain.get(group[0].block_length)
        return again is not None and again.fits(group) and all(step.goes_on for step in self.under_way)

    def launchable(self, group: list[Request]) -> list[Request]:
        """Requests of one block length whose next step can be launched now.

        A request that waits for its rows leaves the others running, once the device would be idle; before
        that all wait a little, so that a step has them all.
        """
        ready: list[Request] = []
        waiting = False
        for request in group:
            if request.is_plain and request.is_certain:
                ready.append(request)
                continue
            if request.left == 0 and request.block >= request.last_block:
                continue  # its last block is done; the report is on its way
            if request.unread and self._needs_report(request):
                return []
            if self.planner.waits_for_rows(request):
                waiting = True
                if request.waits_since is None and not request.unread:
                    request.waits_since = time.perf_counter()
                continue
            ready.append(request)
        if waiting and ready and self.under_way and not self.under_way[-1].report.done():
            return []
        return ready

    def launch(self, requests: list[Request], batch: int) -> None:
        """One step of every request, all of one block length, each at its own step.

        A request whose rows cannot be brought gets its `error` and takes no part; one whose rows or queries
        cannot be kept gets it too.

        Args:
            batch: requests of that block length that decode, those among them that wait for rows.
        """
        block = requests[0].block_length
        again = self._plain.get(block)
        if again is not None and again.fits(requests):
            self._repeat(again)
            return
        self._plain.pop(block, None)
        table = self.table(block)
        plan, parts = self.planner.plan(requests, table)
        if not parts:
            return
        denoising = [part for part in parts if part.step >= 0]
        draws = any(part.request.params.temperature > 0 for part in denoising)
        edits = any(part.request.edits for part in denoising)
        shape = plan.shape(draws, batch if self.runner.use_graphs else 0, edits)
        program = self.runner.program(table, shape)
        numbers = plan.pack(shape, table.masks_row, table.spare)
        report = self._reports.take()
        report.begin(numbers, _free_rows(parts), shape.finals * program.rows_a_final)
        program.run(report.inputs)
        if draws:
            self._draw(program, denoising)
        kept = self._copies(program, plan, parts)
        report.end(program.report, len(denoising))
        self.under_way.append(Step(parts, report))
        if shape.finals or shape.captures:
            self._keep(parts, kept)
        elif not draws:
            self._plain[block] = PlainStep([part.request for part in parts], program, numbers)
        _count(parts)

    def _repeat(self, plain: PlainStep) -> None:
        """The step before once more: its requests only denoise."""
        program, report = plain.program, self._reports.take()
        changed = plain.set_quotas()
        parts = [Part(request, request.block, request.step, lanes=1) for request in plain.requests]
        if changed:
            report.begin(plain.numbers)
        else:
            report.begin_again()
        program.run(report.inputs if changed else None)
        report.end(program.report, len(parts))
        goes_on = True
        for request in plain.requests:
            count_down(request)
            goes_on = goes_on and request.left > 0
        self.under_way.append(Step(parts, report, goes_on))
        _count(parts)

    def commit_first(self, request: Request, logits: torch.Tensor) -> None:
        """Step 0 of a request's first block, from the logits [B, vocab_size] that prefill computed."""
        table = self.table(request.block_length)
        plan = StepPlan()
        plan.add_lane(table.tokens_row(request.slot), request.prefix, 0, 0)
        plan.add_block(0, request.slot, False, request.step_quota)
        program = StepProgram(self.runner, table, StepShape(1, 1, 0, 0, 0, True, request.edits))
        report = self._reports.take()
        report.begin(plan.pack(program.shape, table.masks_row, table.spare))
        program.take_logits(report.inputs, logits)
        part = Part(request, request.block, 0, lead=request.leads and request.left == request.block_length)
        self._draw(program, [part])
        report.end(program.report, 1)
        count_down(request)
        self.under_way.append(Step([part], report))
        _count([part])

    def settle(self, step: Step) -> list[tuple[Part, int, list[int]]]:
        """Take a step's report, which must be done.

        Returns:
            For each part that denoises: masks left (-1 after non-finite logits) and the tokens of its
            block, -1 where masked.
        """
        rows = step.report.read()
        start, end = step.report.span()
        self._reports.give_back(step.report)
        self.planner.ran(step.parts, start, end)
        self._step_seconds = max(end - start, 1e-6)
        lanes = [
            ForwardPart(part.request.request_id, part.block, part.step, part.lanes, part.looks_ahead)
            for part in step.parts
            if part.lanes
        ]
        if lanes:
            self.trace.add_forward(start, end, lanes)
        denoised = [part for part in step.parts if part.step >= 0]
        news: list[tuple[Part, int, list[int]]] = []
        for part, (left, *reported) in zip(denoised, rows, strict=True):
            request = part.request
            request.unread -= 1
            request.counters.steps += not part.lead
            if left >= 0 and not request.is_certain:
                request.pace.saw(request.left, left)
                request.committed = request.left - left
                request.left = left
                request.reported = reported
            news.append((part, left, [max(token, -1) for token in reported]))
        return news

    def release(self, request: Request) -> None:
        """Give back the request's slot."""
        if request.slot >= 0:
            self.table(request.block_length).give_back(request.slot)
            request.slot = -1

    def close(self) -> None:
        """Let the steps under way end, then give their memory back."""
        while self.under_way:
            self.under_way.popleft().report.wait()
        self._tables.clear()
        self.forget_programs()

    def forget_programs(self) -> None:
        """Drop all programs: the rows of the arena that they read are to be replaced."""
        self._plain.clear()
        self.runner.forget_programs()

    def _needs_report(self, request: Request) -> bool:
        """Whether the next step cannot be planned before the steps under way are read."""
        if not request.is_certain:
            return True
        return request.left == 0 and request.may_stop

    def _draw(self, program: StepProgram, parts: list[Part]) -> None:
        """Commit where some request samples: its candidates are drawn, the others' are the likeliest."""
        assert program.logits is not None and program.best is not None and program.confidence is not None
        candidate, confidence = program.best.clone(), program.confidence.clone()
        for row, part in enumerate(parts):
            request = part.request
            # A lead token is the likeliest at any temperature, as in the published code of Fast-dLLM v2.
            if request.params.temperature > 0 and not part.lead:
                assert request.generator is not None
                candidate[row], confidence[row] = draw(program.logits[row], request.params, request.generator)
        program.commit(candidate, confidence)

    def _copies(self, program: StepProgram, plan: StepPlan, parts: list[Part]) -> Kept:
        """Copies of the final rows and the captured queries, which the next step overwrites."""
        if self.planner.retriever is None:
            return Kept()
        finals, captures = len(plan.final_lane), len(plan.capture_lane)
        sources = ((program.final_rows, finals), (program.queries, captures), (program.lse, captures))
        try:
            rows, queries, lse = (
                None if kept is None or not count else kept[:count].clone() for kept, count in sources
            )
            if lse is not None:
                self._leave_votes_to_masks(lse, parts)
            last = rows if lse is None else lse
            return Kept(rows, queries, lse, None if last is None else record_event(last.device))
        except Exception as error:  # no room on the device, say
            for part in parts:
                if part.final or part.captures >= 0:
                    part.request.error = retrieval_error(part.request, error)
            return Kept()

    def _leave_votes_to_masks(self, lse: torch.Tensor, parts: list[Part]) -> None:
        """Of a block that selects for its own steps to come, only what is masked now has a say.

        Args:
            lse: float32 [C, layers, B, heads], changed in place; infinite where a query does not count.
        """
        for votes, part in zip(lse, (part for part in parts if part.captures >= 0)):
            if part.captures == part.block:
                request = part.request
                masked = self.table(request.block_length).masked[request.slot]
                votes.masked_fill_(~masked.unsqueeze(1), float("inf"))

    def _keep(self, parts: list[Part], kept: Kept) -> None:
        """Final rows join their sets and go to the host pool, captured queries to the selector."""
        final = capture = 0
        for part in parts:
            try:
                if part.request.error is None:
                    self._keep_part(part, kept, final, capture)
            except Exception as error:
                part.request.error = retrieval_error(part.request, error)
            final += part.final
            capture += part.captures >= 0

    def _keep_part(self, part: Part, kept: Kept, final: int, capture: int) -> None:
        """As `_keep`. ``final``, ``capture``: the request's place among what is kept."""
        request, retriever = part.request, self.planner.retriever
        if part.final:
            assert request.resident is not None
            request.resident.append_block(request.prefix, follows=part.free_rows is None)
            if retriever is not None:
                assert kept.rows is not None
                retriever.store_block(request, kept.rows[final], request.prefix, kept.after)
        if part.captures >= 0:
            assert kept.queries is not None and kept.lse is not None and retriever is not None
            queries, lse = kept.queries[capture], kept.lse[capture]
            request.selection = retriever.select(
                request, queries, lse, part.captures, part.own_rows_due, kept.after
            )
            self.planner.submitted(part)
            request.counters.lookaheads += part.step >= 0 and part.own_rows_due


def _free_rows(parts: list[Part]) -> list[np.ndarray]:
    """Where in the arena the rows of the final lanes go, in order."""
    found = []
    for part in parts:
        if part.final:
            assert part.request.resident is not None
            found.append(part.request.resident.next_rows() if part.free_rows is None else part.free_rows)
    return found


def _count(parts: list[Part]) -> None:
    """A step of these parts was launched."""
    for part in parts:
        request = part.request
        request.counters.forwards += 1
        if part.step >= 0:
            request.unread += 1
            request.step += not part.lead

"""Decode steps: what is launched when, and what is read back.

A step is launched without waiting for the one before it where the host knows what that one will do: how
many positions it commits (no threshold), and that its request goes on. At most two steps are under way.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from herald.decode import draw
from herald.engine.blocks import BlockTable
from herald.engine.lanes import StepInputs, StepPlan, StepShape
from herald.engine.planner import Part, StepPlanner, count_down, retrieval_error
from herald.engine.program import StepProgram
from herald.engine.reports import ReportPool, StepReport
from herald.engine.request import Request
from herald.engine.retriever import Retriever
from herald.engine.runner import LaneRunner
from herald.engine.trace import Span, Trace

# Steps that may be under way when another one is asked for.
MAX_UNDER_WAY = 2


@dataclass
class Step:
    """A step that was launched. The parts that denoise have the rows of its report, in order."""

    parts: list[Part]
    report: StepReport


@dataclass
class PlainStep:
    """A step in which every request only denoises; the next one is the same but for its quotas.

    Attributes:
        vector: its packed integers; quotas begin at ``quotas_at``.
    """

    requests: list[Request]
    shape: StepShape
    vector: np.ndarray
    quotas_at: int

    def fits(self, requests: list[Request]) -> bool:
        """Whether the next step of ``requests`` is this one again, with other quotas."""
        if len(requests) != len(self.requests):
            return False
        for mine, request in zip(self.requests, requests, strict=True):
            if mine is not request or request.left == 0 or request.step >= request.plain_until:
                return False
        return True

    def set_quotas(self) -> None:
        quotas = [request.step_quota for request in self.requests]
        self.vector[self.quotas_at : self.quotas_at + len(quotas)] = quotas


class Decoder:
    """Launches denoising steps.

    Args:
        runner: programs of steps.
        retriever: look-ahead retrieval, None without offload.
        trace: receives spans.
        max_num_seqs: requests that decode at the same time.

    Attributes:
        planner: what each request does in a step.
    """

    def __init__(
        self, runner: LaneRunner, retriever: Retriever | None, trace: Trace, max_num_seqs: int
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.planner = StepPlanner(retriever, trace)
        self.trace = trace
        self.max_num_seqs = max_num_seqs
        self.under_way: deque[Step] = deque()
        self._plain: PlainStep | None = None
        self._tables: dict[int, BlockTable] = {}
        self._reports = ReportPool(self.model.device)

    def table(self, block_length: int) -> BlockTable:
        """The blocks under way of one length."""
        if block_length not in self._tables:
            mask_id, device = self.model.config.mask_token_id, self.model.device
            self._tables[block_length] = BlockTable(block_length, self.max_num_seqs, mask_id, device)
        return self._tables[block_length]

    def launchable(self, group: list[Request]) -> list[Request]:
        """Requests of one block length whose next step can be launched now.

        A request that waits for its rows leaves the others running, once the device would be idle; before
        that all wait a little, so that a step has them all.
        """
        ready: list[Request] = []
        waiting = False
        for request in group:
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
        table = self.table(requests[0].block_length)
        if self._plain is not None and self._plain.fits(requests):
            shape, vector = self._plain.shape, self._plain.vector
            self._plain.set_quotas()
            parts = [Part(request, request.block, request.step, lanes=1) for request in requests]
            for request in requests:
                count_down(request)
        else:
            plan, parts = self.planner.plan(requests, table)
            if not parts:
                return
            draws = any(part.request.params.temperature > 0 for part in parts if part.step >= 0)
            shape = plan.shape(draws, batch if self.runner.use_graphs else 0)
            vector = plan.pack(shape, table.masks_row, table.spare)
            plain = not plan.final_lane and not plan.capture_lane and not draws
            quotas_at = sum(shape.sizes[: StepInputs._fields.index("quota")])
            denoised = [part.request for part in parts]
            self._plain = PlainStep(denoised, shape, vector, quotas_at) if plain else None
        program = self.runner.program(table, shape)
        report = self._reports.take()
        report.begin(vector)
        program.run(report.inputs)
        denoising = [part for part in parts if part.step >= 0]
        if shape.draws:
            self._draw(program, denoising)
        if shape.finals or shape.captures:
            self._keep(program, parts)
        report.end(program.report, len(denoising))
        for part in denoising:
            part.request.unread += 1
            part.request.step += 1
        for part in parts:
            part.request.counters.forwards += 1
        self.under_way.append(Step(parts, report))

    def commit_first(self, request: Request, logits: torch.Tensor) -> None:
        """Step 0 of a request's first block, from the logits [B, vocab_size] that prefill computed."""
        table = self.table(request.block_length)
        plan = StepPlan()
        plan.add_lane(table.tokens_row(request.slot), request.prefix, 0, 0)
        plan.add_block(0, request.slot, False, request.step_quota)
        program = StepProgram(self.runner, table, StepShape(1, 1, 0, 0, 0, True))
        report = self._reports.take()
        report.begin(plan.pack(program.shape, table.masks_row, table.spare))
        program.take_logits(report.inputs, logits)
        part = Part(request, request.block, 0)
        self._draw(program, [part])
        report.end(program.report, 1)
        count_down(request)
        request.unread += 1
        request.step += 1
        request.counters.forwards += 1
        self.under_way.append(Step([part], report))

    def settle(self, step: Step) -> list[tuple[Part, int, list[int]]]:
        """Take a step's report, which must be done.

        Returns:
            For each part that denoises: masks left (-1 after non-finite logits) and the tokens of its
            block, -1 where masked.
        """
        rows = step.report.read()
        start, end = step.report.span()
        self._reports.give_back(step.report)
        news: list[tuple[Part, int, list[int]]] = []
        for part in step.parts:
            if part.lanes:
                at = (part.request.request_id, part.block, part.step)
                looks = part.step >= 0 and part.captures > part.block
                self.trace.add(Span("forward", start, end, *at, lanes=part.lanes, lookahead=looks))
            if part.step < 0:
                continue
            left, *tokens = rows[len(news)]
            request = part.request
            request.unread -= 1
            request.counters.steps += 1
            if not request.is_certain and left >= 0:
                request.left = left
            news.append((part, left, tokens))
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
        self._plain = None
        self._tables.clear()
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
            if request.params.temperature > 0:
                assert request.generator is not None
                candidate[row], confidence[row] = draw(program.logits[row], request.params, request.generator)
        program.commit(candidate, confidence)

    def _keep(self, program: StepProgram, parts: list[Part]) -> None:
        """Final KV goes to its slots and to the host pool, captured queries to the selector."""
        final = capture = 0
        for part in parts:
            try:
                self._keep_part(program, part, final, capture)
            except Exception as error:
                part.request.error = retrieval_error(part.request, error)
            final += part.final
            capture += part.captures >= 0

    def _keep_part(self, program: StepProgram, part: Part, final: int, capture: int) -> None:
        """As `_keep`. ``final``, ``capture``: the request's place among the rows and the queries kept."""
        request, retriever = part.request, self.planner.retriever
        if part.final:
            assert program.final_rows is not None and request.resident is not None
            rows = _copy(program.final_rows[:, final])
            request.resident.append_block(rows, part.free_rows, request.prefix)
            if retriever is not None:
                retriever.store_block(request, rows, request.prefix)
        if part.captures >= 0:
            assert program.queries is not None and program.lse is not None and retriever is not None
            queries, lse = _copy(program.queries[:, capture]), _copy(program.lse[:, capture])
            request.selection = retriever.select(request, queries, lse, part.captures, part.own_rows_due)
            request.counters.lookaheads += part.step >= 0 and part.own_rows_due


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """What the next step would overwrite."""
    return rows.clone(memory_format=torch.contiguous_format)

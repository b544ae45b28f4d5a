"""Cached steps of requests, and the refresh of their rows within a block."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from herald.engine.canvas.commit import block_views, commit
from herald.engine.canvas.request import CanvasRequest
from herald.engine.canvas.steps import Step, part_of
from herald.engine.canvas.window_step import WindowShape, WindowStep
from herald.engine.failures import retrieval_error
from herald.engine.lanes import next_power_of_2
from herald.engine.prefill import asking
from herald.engine.program import HEAD_LANES
from herald.engine.reports import ReportPool
from herald.engine.resident import put_rows
from herald.engine.retriever import Retriever
from herald.engine.runner import LaneRunner
from herald.engine.trace import Span, Trace
from herald.transfer.streams import record_event


class Windows:
    """Runs cached steps.

    Args:
        runner: gives model and arena.
        reports: of steps.
        use_graphs: record the steps of blocks as CUDA graphs. Windows that reach to the canvas's end have a
            shape of their own for every block and are run kernel by kernel.
        trace: receives spans.
    """

    def __init__(self, runner: LaneRunner, reports: ReportPool, use_graphs: bool, trace: Trace) -> None:
        self.runner = runner
        self.trace = trace
        self.use_graphs = use_graphs and runner.model.device.type == "cuda"
        self._steps: dict[WindowShape, WindowStep] = {}
        self._arena = 0
        self._pool: Any = None
        self._reports = reports

    def forget(self) -> None:
        """Drop all steps: the rows of the arena that they read are gone."""
        self._steps.clear()
        self._pool = None

    def kind(self, request: CanvasRequest) -> tuple[int, int, bool]:
        """Requests of one kind share a step."""
        return request.window, request.block_length, self._refreshes(request)

    def launch(self, group: list[CanvasRequest]) -> Step:
        """One step of requests of one kind."""
        masks = self.runner.model.config.mask_token_id
        parts = [part_of(request, request.plan.rule.take(request.state)) for request in group]
        step = self._step(group)
        report = self._reports.take()
        report.begin(self._numbers(group))
        begins = [(request.begin, request.begin + request.window) for request in group]
        tokens = [r.tokens[begin:end] for r, (begin, end) in zip(group, begins) if r.tokens is not None]
        step.run(torch.stack(tokens), report.inputs)
        assert step.hidden is not None
        made = []
        for first in range(0, len(parts), HEAD_LANES):
            hidden = step.hidden[first : first + HEAD_LANES]
            logits = self.runner.model.logits(hidden.flatten(0, 1)).unflatten(0, (len(hidden), -1))
            made += [
                commit(part.request, each, part.take, masks)
                for part, each in zip(parts[first:], logits, strict=False)
            ]
        report.end(torch.stack(made), len(group))
        return Step(parts, report, traced=True)

    def start_refreshes(self, step: Step, retriever: Retriever | None) -> None:
        """Where the step just launched is the one, choose rows anew by the queries of the blocks.

        A request whose selection cannot be started gets its `error`.
        """
        group = [part.request for part in step.parts]
        if retriever is None or not self._refreshes(group[0]):
            return
        forward = self._step(group)
        assert forward.queries is not None and forward.lse is not None
        shifted = self.runner.model.config.shifted
        for lane, part in enumerate(step.parts):
            request = part.request
            if part.take.look >= request.state.left and part.take.is_certain:
                continue  # its block ends with this step
            try:
                votes = asking(block_views(request)[1], shifted)
                lse = forward.lse[:, lane].masked_fill(~votes[:, None], float("inf"))
                queries = forward.queries[:, lane].contiguous()
                after = record_event(queries.device)
                request.selection = retriever.select(request, queries, lse, request.block, False, after)
            except Exception as error:
                request.error = retrieval_error(request, error)
            request.refreshed = part.step
        forward.queries = forward.lse = None

    def land_refresh(self, request: CanvasRequest, retriever: Retriever | None) -> None:
        """Bring the rows of a refresh in before the step that is to see them; wait where they are late."""
        selection, resident = request.selection, request.resident
        if selection is None or retriever is None or resident is None:
            return
        if request.state.step < request.refreshed + resident.config.refresh_lag:
            return
        start = time.perf_counter()
        update = selection.update.result()
        if update.ticket is not None:
            update.ticket.wait_host()
            request.counters.transfer_seconds += update.ticket.seconds or 0.0
            if (span := update.ticket.span) is not None:
                moved, at = len(update.plan.src_rows), (request.request_id, request.block)
                self.trace.add(Span("transfer", *span, *at, rows=moved, bytes=update.ticket.bytes))
        end = time.perf_counter()
        request.counters.exposed_seconds += end - start
        self.trace.add(Span("wait", start, end, request.request_id, request.block))
        verify = partial(retriever.verify, request, update) if resident.config.verify_transfers else None
        if (arrived := resident.accept(update, verify)) is not None:
            put_rows([arrived])
        request.selection = None

    def _refreshes(self, request: CanvasRequest) -> bool:
        """Whether the next step's queries choose rows anew."""
        if not request.refreshes or request.refreshed or request.resident is None:
            return False
        resident, prompt = request.resident, len(request.prompt_ids)
        config = resident.config
        chooses = resident.size_for(prompt) < prompt or not config.difference_only
        return chooses and request.state.step >= config.refresh_step

    def _step(self, group: list[CanvasRequest]) -> WindowStep:
        """The step of the group's shape, made (and recorded) when it is first asked for."""
        arena = self.runner.arena.replaced
        if arena != self._arena:
            self.forget()
            self._arena = arena
        first, captures = group[0], self._refreshes(group[0])
        longest = next_power_of_2(max(request.near + _length(request) for request in group))
        recorded = self.use_graphs and first.plan.cache == "dual" and not captures
        shape = WindowShape(len(group), first.window, first.block_length, longest, captures, recorded)
        step = self._steps.get(shape)
        if step is None:
            if recorded:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
            step = self._steps[shape] = WindowStep(self.runner, shape, self._pool)
        return step

    def _numbers(self, group: list[CanvasRequest]) -> np.ndarray:
        """First position of each window, first arena row and count of the rows that it sees."""
        starts = [request.resident.row_start - request.near for request in group if request.resident]
        lengths = [request.near + _length(request) for request in group]
        return np.array([*(request.begin for request in group), *starts, *lengths], dtype=np.int64)


def _length(request: CanvasRequest) -> int:
    assert request.resident is not None
    return request.resident.length

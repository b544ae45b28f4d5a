"""`CanvasEngine`: requests of families with full attention, one unit or step at a time."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext

import numpy as np
import torch

from herald.config import EngineConfig, OffloadConfig, check
from herald.decode import BlockState, CanvasPolicy
from herald.engine.blocks import to_device
from herald.engine.canvas.commit import commit
from herald.engine.canvas.full_forward import FullForward, Keep
from herald.engine.canvas.request import CanvasRequest
from herald.engine.canvas.steps import Step, StepsUnderWay, part_of
from herald.engine.canvas.windows import Windows
from herald.engine.engine import Engine, ProgressCallback
from herald.engine.failures import retrieval_error, step_error
from herald.engine.intake import Intake
from herald.engine.limits import check_prompt
from herald.engine.reports import ReportPool
from herald.engine.request import Phase, Request
from herald.errors import NonFiniteLogits
from herald.models import BlockModel
from herald.outputs import Progress
from herald.tokenizer import Tokenizer

# Options of offload that ask for a look-ahead; rows are chosen when a block begins, and are there at once.
NO_LOOKAHEAD = ("lookahead", "lookahead_step", "lookahead_context", "on_late")


class CanvasEngine(Engine):
    """See `Engine` and this package's docstring.

    Raises:
        InvalidOption: an option of offload that has no meaning here.
    """

    def __init__(
        self,
        model: BlockModel,
        tokenizer: Tokenizer,
        offload: OffloadConfig,
        config: EngineConfig,
        seed: int | None = None,
        poison: bool = False,
    ) -> None:
        for field in NO_LOOKAHEAD:
            value, default = getattr(offload, field), getattr(OffloadConfig, field)
            remedy = f"use {default!r}: a family with full attention chooses its rows as a block begins"
            check(value == default, field, value, remedy)
        usual = offload.refresh_commits in (0.0, OffloadConfig.refresh_commits)
        check(usual, "refresh_commits", offload.refresh_commits, "use 0: such a family has no look-ahead")
        super().__init__(model, tokenizer, offload, config, seed, poison)
        self._reports = ReportPool(model.device)
        self._windows = Windows(self.runner, self._reports, config.cuda_graphs, self.trace)
        self._steps = StepsUnderWay(self._reports, self.trace)
        self._report = self._reports.take()  # of the full forward under way
        self._turns = itertools.count(1)

    def _step(self, progress: ProgressCallback | None) -> list[Request]:
        """Admit, run units of one full forward, denoise one cached step."""
        news = self.end_aborted()
        news += self._admit()
        news += self._run_full_forward(progress)
        news += self._run_windows()
        return news + self._settle_steps(progress)

    def close(self) -> None:
        for _ in self._steps.settle(everything=True):
            pass
        super().close()
        self._windows.forget()

    def _make_request(self, came: Intake) -> Request:
        assert isinstance(came.policy, CanvasPolicy)
        plan = came.policy.plan(came.params, self.model.config.block_length)
        check_prompt(came.prompt_ids, came.params, 1, self.model.config, self.max_model_len, plan.length)
        refreshes = self.offload.enabled and self.offload.refresh_step > 0 and plan.cache != "none"
        return CanvasRequest(**vars(came), block_length=plan.block_length, plan=plan, refreshes=refreshes)

    def _start_prefill(self, request: Request) -> None:
        assert isinstance(request, CanvasRequest)
        device, canvas = self.model.device, request.plan.length
        tokens = np.full(request.length, self.model.config.mask_token_id, dtype=np.int64)
        tokens[: len(request.prompt_ids)] = request.prompt_ids
        request.tokens = to_device(tokens, device)
        request.masked = torch.ones(canvas, dtype=torch.bool, device=device)
        request.generator = self._generator(request)
        request.state = BlockState.begin(request.block_length)
        request.turn = next(self._turns)
        self._begin_full_forward(request)

    def _begin_full_forward(self, request: CanvasRequest) -> None:
        """Lay out the next full forward: prompt, canvas outside the block, block."""
        assert request.tokens is not None and request.masked is not None and request.resident is not None
        self._drop_selection(request)
        request.refreshed = 0
        begin, end, prompt = request.begin, request.begin + request.block_length, len(request.prompt_ids)
        order = to_device(
            np.concatenate([np.arange(begin), np.arange(end, request.length), np.arange(begin, end)]),
            self.model.device,
        )
        shifted, first = int(self.model.config.shifted), request.length - request.block_length
        wanted = [range(first, request.length - shifted)]
        if shifted:
            wanted.insert(0, range(begin - 1, begin))
        keep = None
        if request.keeps:
            masked = request.masked[begin - prompt : end - prompt]
            keep = Keep(request.resident, request.near, masked, self.first_scores)
        stores = self.retriever if request.refreshes else None
        request.full = FullForward(
            self.runner,
            request.tokens.index_select(0, order),
            order,
            prompt,
            request.block_length,
            wanted,
            self.config.prefill_chunk,
            keep,
            None if stores is None else stores.row_store(request),
        )

    def _drop_selection(self, request: CanvasRequest) -> None:
        """Let a refresh that its block did not live to see end before its rows are made anew."""
        selection, request.selection = request.selection, None
        if selection is not None and selection.update.exception() is None:
            ticket = selection.update.result().ticket
            if ticket is not None:
                ticket.wait_host()

    def _canvases(self) -> list[CanvasRequest]:
        """Requests that have their memory."""
        return [request for request in self.scheduler.running if isinstance(request, CanvasRequest)]

    def _run_full_forward(self, progress: ProgressCallback | None) -> list[Request]:
        """Units of one full forward; all where nobody decodes beside it.

        One at a time is under way, so that one at a time holds a layer's rows; then the request's turn that
        waited longest.
        """
        due = [request for request in self._canvases() if request.full is not None]
        if not due:
            return []
        request = min(due, key=lambda each: (each.full is None or not each.full.begun, each.turn))
        alone = all(each.full is not None for each in self._canvases())
        self.budget.begin(sum(each.block_length for each in self._canvases() if each.full is None))
        request.prefill_started = request.prefill_started or time.perf_counter()
        task = request.full
        assert task is not None
        while not (task.done or request.abort_requested) and (alone or self.budget.take(self._cost_of(task))):
            try:
                self._run_unit(request, task)
            except Exception as error:  # half a unit ran: it cannot be run again
                request.error = retrieval_error(request, error)
                break
            self._tell_prefill(request, task.share_done, progress)
        self.budget.end(waits=not alone and not task.done)
        return self._end_failed([request])

    def _cost_of(self, task: FullForward) -> int:
        """Of the next unit; a layer reads every chunk twice."""
        positions, context = task.next_unit
        return max(self.budget.unit_cost(positions, context) // 2, 1)

    def _run_unit(self, request: CanvasRequest, task: FullForward) -> None:
        """One unit; the last one is a step of the block."""
        first = request.phase is Phase.PREFILL
        if not task.begun:
            self._report = self._reports.take()
            self._report.begin_again()
        with self.trace.device_span("prefill", request.request_id) if first else nullcontext():
            task.run_unit()
        if task.done:
            self._commit_full(request, task, traced=not first)

    def _commit_full(self, request: CanvasRequest, task: FullForward, traced: bool) -> None:
        """The step of the block that a full forward is."""
        assert task.logits is not None and request.resident is not None
        request.full = None
        request.phase = Phase.DECODE
        if request.keeps and request.resident.size_for(len(request.prompt_ids)) < len(request.prompt_ids):
            request.counters.rows_selected += request.resident.num_rows
        part = part_of(request, request.plan.rule.next(request.state))
        row = commit(request, task.logits, part.take, self.model.config.mask_token_id)
        self._report.end(row.unsqueeze(0), 1)
        self._launched(Step([part], self._report, traced))

    def _tell_prefill(self, request: CanvasRequest, share: float, progress: ProgressCallback | None) -> None:
        """Report the first full forward, in tokens x layers of the prompt."""
        if progress is not None and not request.prefilled:
            total = len(request.prompt_ids) * self.model.config.num_layers
            progress(Progress(request.request_id, "prefill", int(total * share), total))

    def _run_windows(self) -> list[Request]:
        """One cached step of the requests whose windows are alike, the longest without a step first."""
        ready = [r for r in self._canvases() if r.full is None and r.phase is Phase.DECODE and not r.unread]
        for request in ready:
            request.plan.rule.next(request.state)
            try:
                self._windows.land_refresh(request, self.retriever)
            except Exception as error:
                request.error = retrieval_error(request, error)
        news = self._end_failed([*ready])
        ready = [request for request in ready if request.error is None]
        if not ready:
            return news
        first = min(ready, key=lambda each: each.turn)
        group = [r for r in ready if self._windows.kind(r) == self._windows.kind(first)]
        try:
            step = self._windows.launch(group)
        except Exception as error:  # no room on the device, say: half a step ran
            for each in group:
                each.error = step_error(each, error)
        else:
            self._windows.start_refreshes(step, self.retriever)
            self._launched(step)
        return news + self._end_failed([*group])

    def _launched(self, step: Step) -> None:
        """A step is under way; the next one of a request need not wait where what it takes is certain."""
        self._steps.launched(step)
        for part in step.parts:
            request = part.request
            request.turn = next(self._turns)
            request.counters.forwards += 1
            request.unread = 0 if part.counted else 1
            if part.counted and not request.keeps and request.error is None:
                self._try_full_forward(request)

    def _settle_steps(self, progress: ProgressCallback | None) -> list[Request]:
        """Read the steps that have run, and those that requests wait for."""
        news: list[Request] = []
        for part, left, tokens in self._steps.settle(everything=False):
            request = part.request
            if request.phase is Phase.FINISHED:  # it ended while this step was under way
                continue
            request.counters.steps += 1
            request.prefilled = request.prefilled or time.perf_counter()
            if left < 0:
                request.error = NonFiniteLogits(
                    f"request {request.request_id}: NaN or infinite logits in block {part.block}",
                    "check the weights, or use dtype='float32'",
                )
            elif not part.counted:
                request.unread = 0
                request.state.took(part.take, request.state.left - left)
                if left == 0:
                    self._end_block(request, tokens, progress)
                    news.append(request)
                elif not request.keeps:
                    self._try_full_forward(request)
            news += self._end_failed([request])
        return news

    def _end_block(
        self, request: CanvasRequest, tokens: list[int], progress: ProgressCallback | None
    ) -> None:
        """Show a finished block, and begin the next one unless the output is complete."""
        self._close_block(request, request.block, tokens)
        if request.phase is not Phase.FINISHED:
            request.block += 1
            request.state = BlockState.begin(request.block_length)
            self._try_full_forward(request)
        if progress is not None:
            done, total = len(request.output_ids), request.params.max_tokens
            progress(Progress(request.request_id, "decode", done, total))

    def _try_full_forward(self, request: CanvasRequest) -> None:
        """As `_begin_full_forward`; what goes wrong becomes the request's error."""
        try:
            self._begin_full_forward(request)
        except Exception as error:  # no room on the device, say
            request.error = retrieval_error(request, error)

"""The engine: requests in, finished blocks out, one step at a time."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.decode import DecodePolicy, StopChecker, policy_for, request_generator
from herald.engine.blocks import to_device
from herald.engine.decoder import MAX_UNDER_WAY, Decoder
from herald.engine.failures import retrieval_error, step_error
from herald.engine.intake import Intake
from herald.engine.limits import check_page, check_prompt, model_len, offload_for, offload_of
from herald.engine.lookahead import LateLookahead
from herald.engine.memory import EngineMemory, HostStore
from herald.engine.memory_needs import memory_needs
from herald.engine.prefill import PrefillTask, scores_by
from herald.engine.prefill_budget import PrefillBudget
from herald.engine.request import Phase, Request
from herald.engine.retriever import Retriever
from herald.engine.runner import LaneRunner
from herald.engine.scheduler import Scheduler
from herald.engine.selection_clock import SelectionClock
from herald.engine.shared_prefix import SharedPrefixes
from herald.engine.trace import Trace
from herald.engine.waiting import wait_for_rows
from herald.errors import InvalidOption, NonFiniteLogits, RequestAborted
from herald.models import BlockModel
from herald.outputs import FinishReason, Progress
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from herald.transfer.streams import current_device

ProgressCallback = Callable[[Progress], None]


class Engine:
    """Serves requests on one model.

    Args:
        model, tokenizer: from the same folder.
        offload: where the KV lives.
        config: limits.
        seed: of the generator that gives requests without a seed theirs; None for a random one.
        poison: fill device rows that nobody owns with NaN (tests).

    Attributes:
        trace: when each part worked.
        prefixes: pages that requests share.
        first_scores: by which prefill chooses a request's first set; replaced to compare ways to choose.
        on_retriever: called with each retriever and its store as they are made, so that a test can
            slow them down or break them. None in normal use.
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
        self.model = model
        self.tokenizer = tokenizer
        self.offload = offload = offload_for(model.config, offload)
        self.config = config
        self._max_model_len = model_len(model.config, config.max_model_len)
        self.trace = Trace(device=model.device)
        self.memory = EngineMemory(model, offload, poison)
        self.prefixes = SharedPrefixes(self.memory, config.prefill_chunk)
        self.scheduler = Scheduler(config)
        self.budget = PrefillBudget(model.config, config.tokens_per_step, config.max_num_seqs)
        self.runner = LaneRunner(model, self.memory.arena, config.cuda_graphs, self.memory.windows)
        self.retriever: Retriever | None = None
        self.decoder = Decoder(self.runner, None, self.trace, config.max_num_seqs)
        if offload.lookahead == "late":
            self.decoder.planner.clock = SelectionClock(LateLookahead())
        self.first_scores = scores_by(offload.score_operator)
        self.on_retriever: Callable[[Retriever, HostStore], None] | None = None
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._seeds = request_generator("cpu", random.getrandbits(32) if seed is None else seed)
        self._lock = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Positions a request may use."""
        return self._max_model_len

    def add_request(
        self, prompt_ids: list[int], params: SamplingParams, prompt: str | None = None, request_id: str = ""
    ) -> Request:
        """Queue a request; raises what `new_request` and `enqueue` raise."""
        return self.enqueue(self.new_request(list(prompt_ids), params, prompt, request_id))

    def new_request(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        request_id: str = "",
        with_text: bool = True,
    ) -> Request:
        """A request that can run here, not queued yet; without text unless ``with_text``. Thread-safe.

        Raises:
            PromptTooLong, InvalidOption, HostPoolTooSmall: it could never run.
        """
        policy = policy_for(self.model.config)
        params = policy.settle(params)
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        decode = self.tokenizer.decode if with_text and self.tokenizer.available else None
        checker = StopChecker(params, eos, decode)
        request_id = request_id or f"request-{next(self._ids)}"
        came = Intake(request_id, prompt_ids, params, eos, checker, policy, prompt)
        request = self._make_request(came)
        request.offload = offload_of(params, self.offload)
        self.memory.require_pages(self.memory.pages_for(request.stored_positions), len(prompt_ids))
        return request

    def enqueue(self, request: Request) -> Request:
        """Queue a request of `new_request`; raises `InvalidOption` where its id is in use."""
        with self._lock:
            if request.request_id in self._requests:
                raise InvalidOption(f"request_id={request.request_id!r} is in use", "choose another")
            self._requests[request.request_id] = request
            self.scheduler.waiting.append(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Stop a request at the next step boundary. Thread-safe. False when it is not known (any more)."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            request.abort_requested = True
            return True

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler.has_work

    @torch.no_grad()
    def step(self, progress: ProgressCallback | None = None) -> list[Request]:
        """Admit, prefill some, denoise one step.

        Returns:
            Requests with news: a finished block, the end, or an error.
        """
        with current_device(self.model.device):
            return self._step(progress)

    def _step(self, progress: ProgressCallback | None) -> list[Request]:
        news = self.end_aborted()
        news += self._admit()
        news += self._prefill(progress)
        news += self._settle_done(progress)
        launched = False
        groups = self.scheduler.decoding()
        alone = self.scheduler.is_all(groups)
        for group in groups:
            if not self.decoder.has_room(group, alone):
                break
            batch = self.decoder.launchable(group)
            if batch:
                self._launch(batch, len(group))
                self.scheduler.had_turn(batch[0].block_length)
                launched = True
                news += self._end_failed(batch)
        if not launched or not self.decoder.has_room(groups[0], alone):
            self._wait()
        return news + self._settle_done(progress)

    def close(self) -> None:
        """End every request and give all memory back."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, "abort")
        self.decoder.close()
        if self.retriever is not None:
            self.retriever.drain()
            self.retriever.close()
            self.retriever = None
        self.memory.close()

    def _make_request(self, came: Intake) -> Request:
        """The request, checked."""
        params, policy, config = came.params, came.policy, self.model.config
        assert isinstance(policy, DecodePolicy)
        block = params.block_length or config.block_length
        from_prompt = policy.blocks_from_prompt
        check_prompt(came.prompt_ids, params, block, config, self.max_model_len, from_prompt=from_prompt)
        if self.offload.enabled:
            check_page(block, self.memory.layout.page_size)
        windows = policy.windows(block, params, config.shifted)
        request = Request(**vars(came), block_length=block, windows=windows, leads=config.shifted)
        if request.is_certain:
            self.offload.check_steps(len(request.quotas))
        return request

    def end_aborted(self) -> list[Request]:
        """End the requests that were aborted since the last step; `step` does this first."""
        with self._lock:
            ended = [r for r in self._requests.values() if r.abort_requested]
        for request in ended:
            request.error = RequestAborted(f"request {request.request_id} was aborted")
            self._finish(request, "abort")
        return ended

    def _admit(self) -> list[Request]:
        """Give waiting requests their memory, in order, as far as there is some."""
        failed = []
        while (request := self.scheduler.next_to_admit()) is not None:
            try:
                if not self._take_memory(request):
                    break
                self.scheduler.admitted(request)
                self._start_prefill(request)
            except Exception as error:  # no room, say
                request.error = retrieval_error(request, error)
                failed += self._end_failed([request])
        return failed

    def _take_memory(self, request: Request) -> bool:
        """Pages and arena rows for all blocks the request can use; False when it has to wait."""
        if not self.scheduler.running:
            if self.retriever is not None:
                self.retriever.drain()  # memory of requests that ended is on its way back
            self._grow()
        try:
            request.resident = request.make_resident(self.memory.arena, request.offload)
            request.resident.take_window(self.memory.windows, self.memory.window_rows)
        except MemoryError:
            return False
        if not self.prefixes.take(request, alone=not self.scheduler.running):
            request.resident.release()
            request.resident = None
            return False
        request.counters.resident_bytes = request.resident.num_bytes
        return True

    def _grow(self) -> None:
        """Size arena and pool for as many waiting requests as may run at once, at least for the first."""
        replaced = self.memory.replaced
        waiting = list(itertools.islice(self.scheduler.waiting, self.config.max_num_seqs))
        try:
            self.memory.ensure_one(memory_needs(waiting, self.prefixes))
        finally:
            if self.memory.replaced != replaced:
                self.decoder.forget_programs()  # they read the rows that were replaced
            self.connect()

    def connect(self) -> None:
        """Make the retriever anew when the store was replaced."""
        store = self.memory.store
        if self.retriever is not None and self.retriever.store is store:
            return
        if self.retriever is not None:
            self.retriever.close()
            self.retriever = None
        if store is not None:
            shape = (self.model.config.block_length, self.model.config.num_heads)
            self.retriever = Retriever(store, self.model.softmax_scale, self.trace, shape, self.prefixes)
            if self.on_retriever is not None:
                self.on_retriever(self.retriever, store)
        self.decoder.planner.retriever = self.retriever

    def _start_prefill(self, request: Request) -> None:
        seed = self._seed(request)
        request.generator = request_generator(self.model.device, seed)
        self.decoder.table(request.block_length).begin(request, seed)
        request.block = request.selected_block = request.prompt_blocks

    def _prefill_task(self, request: Request) -> PrefillTask:
        """The prefill of a request whose turn it is: only now is it known what it shares."""
        assert request.resident is not None
        retriever, table = self.retriever, self.decoder.table(request.block_length)
        prefix = np.array(request.prompt_ids[: request.prefix], dtype=np.int64)
        return PrefillTask(
            self.runner,
            request.resident,
            to_device(prefix, self.model.device),
            table.tokens[request.slot],
            table.masked[request.slot],
            self.config.prefill_chunk,
            None if retriever is None else retriever.row_store(request),
            self.first_scores,
        )

    def _generator(self, request: Request) -> torch.Generator:
        """The request's own."""
        return request_generator(self.model.device, self._seed(request))

    def _seed(self, request: Request) -> int:
        """The request's, or one that is drawn for it."""
        seed = request.params.seed
        return int(torch.randint(2**62, (), generator=self._seeds)) if seed is None else seed

    def _prefill(self, progress: ProgressCallback | None) -> list[Request]:
        request = self.scheduler.prefilling()
        if request is None:
            return []
        try:
            task = request.prefill = request.prefill or self._prefill_task(request)
        except Exception as error:  # no room on the device, say
            request.error = retrieval_error(request, error)
            return self._end_failed([request])
        budget, active = self.budget, self.scheduler.active_positions
        budget.begin(active)
        total = len(request.prompt_ids) * self.model.config.num_layers
        request.prefill_started = request.prefill_started or time.perf_counter()
        while not (task.done or request.abort_requested) and budget.take(budget.unit_cost(*task.next_unit)):
            try:
                with self.trace.device_span("prefill", request.request_id):
                    task.run_unit()
            except Exception as error:  # half a unit ran: it cannot be run again
                request.error = retrieval_error(request, error)
                return self._end_failed([request])
            if progress is not None:
                progress(Progress(request.request_id, "prefill", task.progress, total))
        budget.end(waits=active > 0 and not task.done)
        if not task.done:
            return []
        assert task.logits is not None
        if request.resident is not None and request.resident.needs_selection(request.prefix):
            request.counters.rows_selected += request.resident.num_rows
        try:
            self.decoder.commit_first(request, task.logits)
        except Exception as error:  # no room on the device, say
            request.error = retrieval_error(request, error)
            return self._end_failed([request])
        if self.retriever is not None:
            self.retriever.sharing.prefilled(request)
        request.prefill = None
        request.phase = Phase.DECODE
        if progress is not None:
            progress(Progress(request.request_id, "prefill", total, total))
        return []

    def _launch(self, batch: list[Request], count: int) -> None:
        """As `Decoder.launch`. Where it fails, half a step ran: all that took part get an error."""
        try:
            self.decoder.launch(batch, count)
        except Exception as error:  # no room on the device, say
            for request in batch:
                request.error = request.error or step_error(request, error)

    def _settle_done(self, progress: ProgressCallback | None) -> list[Request]:
        """Read the steps that have run."""
        news = []
        while self.decoder.under_way and self.decoder.under_way[0].report.done():
            news += self._settle(progress)
        return news

    def _wait(self) -> None:
        """Let the host wait for what comes first: the last step but one, or rows that a request waits for.

        Returns at once while a prompt is being prefilled, and after 20 ms in any case.
        """
        under_way = self.decoder.under_way
        if len(under_way) >= MAX_UNDER_WAY:
            under_way[-2].report.wait()
        elif self.scheduler.prefilling() is None:
            waited = wait_for_rows(self.scheduler.running, self.decoder, self.retriever)
            if under_way and not waited:
                under_way[0].report.wait()

    def _settle(self, progress: ProgressCallback | None) -> list[Request]:
        """Read the oldest step: close blocks that are finished, end requests."""
        news = []
        for part, left, tokens in self.decoder.settle(self.decoder.under_way.popleft()):
            request = part.request
            if request.phase is Phase.FINISHED:  # it ended while this step was under way
                continue
            request.prefilled = request.prefilled or time.perf_counter()
            if left < 0:
                request.error = NonFiniteLogits(
                    f"request {request.request_id}: NaN or infinite logits in block {part.block}",
                    "check the weights, or use dtype='float32'",
                )
                self._finish(request, "abort")
                news.append(request)
            elif left == 0 or (not request.edits and self._block_done(request, part.block, tokens)):
                self._close_block(request, part.block, tokens)
                news.append(request)
                if progress is not None:
                    done, total = len(request.output_ids), request.params.max_tokens
                    progress(Progress(request.request_id, "decode", done, total))
        return news

    def _end_failed(self, requests: list[Request]) -> list[Request]:
        """End requests whose rows could not be made, kept or brought."""
        failed = [request for request in requests if request.error is not None]
        for request in failed:
            self._finish(request, "abort")
        return failed

    def _block_done(self, request: Request, block: int, tokens: list[int]) -> bool:
        """No mask is left in the block, or none that could still change the output.

        Args:
            tokens: of the block, -1 where masked.
        """
        begin = request.prompt_in_block(block)
        last = len(request.prompt_ids) + request.params.max_tokens
        end = min(last - request.start_of(block), len(tokens))
        shown = tokens[begin:end]
        if -1 not in shown:
            return True
        return not set(request.eos_token_ids).isdisjoint(shown[: shown.index(-1)])

    def _close_block(self, request: Request, block: int, tokens: list[int]) -> None:
        """Take a finished block's tokens, -1 where masked; end the request where they say so."""
        fresh = tokens[request.prompt_in_block(block) :]
        checker = request.checker
        reason = checker.append(fresh[: fresh.index(-1)] if -1 in fresh else fresh)
        request.counters.blocks += 1
        if request.counters.blocks == 1:
            request.first_block_done = time.perf_counter()
        request.output_ids, request.text = list(checker.token_ids), checker.text
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and give back what it holds, now or once nothing on its way can touch it."""
        request.finish_reason = reason
        request.finished_at = time.perf_counter()
        self.scheduler.remove(request)
        self.decoder.release(request)
        with self._lock:
            self._requests.pop(request.request_id, None)
        request.drop_prefill()  # it reads shared pages: before they are given back
        if self.retriever is not None:
            self.retriever.retire(request)
        elif request.resident is not None:
            request.resident.release()

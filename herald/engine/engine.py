"""The engine: requests in, finished blocks out, one step at a time."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from herald.config import EngineConfig, OffloadConfig
from herald.decode import StopChecker, request_generator
from herald.engine.decoder import Decoder
from herald.engine.memory import EngineMemory, HostStore
from herald.engine.prefill import PrefillTask, first_block
from herald.engine.request import Phase, Request
from herald.engine.resident import ResidentSet
from herald.engine.retriever import Retriever
from herald.engine.runner import LaneRunner
from herald.engine.scheduler import Scheduler
from herald.engine.trace import Trace
from herald.errors import HostPoolTooSmall, InvalidOption, PromptTooLong, RequestAborted, ResidentSetTooSmall
from herald.models import BlockModel
from herald.outputs import FinishReason, Progress
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer

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
        self.offload = offload
        self.config = config
        self.trace = Trace()
        self.memory = EngineMemory(model, offload, poison)
        self.scheduler = Scheduler(config)
        self.runner = LaneRunner(model, self.memory.arena)
        self.retriever: Retriever | None = None
        self.decoder = Decoder(self.runner, None, self.trace)
        self.on_retriever: Callable[[Retriever, HostStore], None] | None = None
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._seeds = request_generator("cpu", random.getrandbits(32) if seed is None else seed)
        self._lock = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Positions a request may use."""
        limit = self.model.config.max_positions
        return min(self.config.max_model_len or limit, limit)

    def add_request(
        self, prompt_ids: list[int], params: SamplingParams, prompt: str | None = None, request_id: str = ""
    ) -> Request:
        """Queue a request.

        Args:
            prompt_ids: at least one token id.

        Raises:
            PromptTooLong, InvalidOption, HostPoolTooSmall: it could never run.
        """
        block = params.block_length or self.model.config.block_length
        self._check(prompt_ids, params, block)
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise InvalidOption(f"request_id={request_id!r} is in use", "choose another")
        checker = StopChecker(params, eos, self.tokenizer.decode if self.tokenizer.available else None)
        request = Request(request_id, list(prompt_ids), params, block, eos, checker, prompt)
        self.memory.require_pages(self.memory.pages_for(request.last_prefix), len(prompt_ids))
        with self._lock:
            self._requests[request_id] = request
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
        news = self.end_aborted()
        news += self._admit()
        news += self._prefill(progress)
        for group in self.scheduler.decoding():
            # Who waits for rows does not hold up the others; when all do, there is nothing else to run.
            batch = [r for r in group if self.decoder.ready(r)] or group
            self.decoder.step(batch)
            news += self._advance(batch, progress)
        return news

    def close(self) -> None:
        """End every request and give all memory back."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, "abort")
        if self.retriever is not None:
            self.retriever.drain()
            self.retriever.close()
            self.retriever = None
        self.memory.close()

    def _check(self, prompt_ids: list[int], params: SamplingParams, block: int) -> None:
        if not prompt_ids:
            raise InvalidOption("the prompt has no tokens", "pass at least one token")
        vocab = self.model.config.vocab_size
        bad = next((t for t in prompt_ids if not 0 <= t < vocab), None)
        if bad is not None:
            raise InvalidOption(f"token id {bad} is not in the vocabulary", f"use ids from 0 to {vocab - 1}")
        page = self.memory.layout.page_size
        if self.offload.enabled and page % block:
            raise InvalidOption(
                f"block_length={block} does not divide the page size {page}",
                f"use page_size={-(-page // block) * block} or another block length",
            )
        needed = -(-(len(prompt_ids) + params.max_tokens) // block) * block
        if needed > self.max_model_len:
            room = self.max_model_len // block * block - params.max_tokens
            remedy = f"use at most {room:,} prompt tokens, or a smaller max_tokens"
            if room < 1:
                remedy = (
                    f"use max_tokens below {self.max_model_len // block * block:,}, or a longer max_model_len"
                )
            raise PromptTooLong(
                f"prompt of {len(prompt_ids):,} tokens + max_tokens={params.max_tokens:,} exceed "
                f"the limit of {self.max_model_len:,} positions",
                remedy,
            )

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
            except (HostPoolTooSmall, ResidentSetTooSmall) as error:
                request.error = error
                self._finish(request, "abort")
                failed.append(request)
                continue
            self.scheduler.admitted(request)
            self._start_prefill(request)
        return failed

    def _take_memory(self, request: Request) -> bool:
        """Pages and arena rows for all blocks the request can use; False when it has to wait."""
        if not self.scheduler.running:
            if self.retriever is not None:
                self.retriever.drain()  # memory of requests that ended is on its way back
            self._grow()
        pages = self.memory.pages_for(request.last_prefix)
        store = self.memory.store
        if pages and (store is None or pages > store.pool.allocator.num_free):
            return False
        try:
            request.resident = ResidentSet(
                self.memory.arena,
                self.offload,
                request.block_length,
                request.first_prefix,
                request.last_prefix,
            )
        except MemoryError:
            return False
        if store is not None and pages:
            request.pages = store.pool.allocator.allocate(pages)
            request.counters.host_kv_bytes = pages * self.memory.layout.page_bytes
        request.counters.resident_bytes = request.resident.num_bytes
        return True

    def _grow(self) -> None:
        """Size arena and pool for as many waiting requests as may run at once, at least for the first."""
        waiting = itertools.islice(self.scheduler.waiting, self.config.max_num_seqs)
        needs = [self._required_memory(request) for request in waiting]
        try:
            self.memory.ensure(sum(rows for rows, _ in needs), sum(pages for _, pages in needs))
        except (HostPoolTooSmall, ResidentSetTooSmall):
            self.memory.ensure(*needs[0])
        finally:
            self._connect()

    def _required_memory(self, request: Request) -> tuple[int, int]:
        """(arena rows, pages) for all blocks the request can use."""
        prefixes = (request.first_prefix, request.last_prefix)
        rows = sum(ResidentSet.required_rows(self.offload, request.block_length, *prefixes))
        return rows, self.memory.pages_for(request.last_prefix)

    def _connect(self) -> None:
        """Make the retriever anew when the store was replaced."""
        store = self.memory.store
        if self.retriever is not None and self.retriever.store is store:
            return
        if self.retriever is not None:
            self.retriever.close()
            self.retriever = None
        if store is not None:
            self.retriever = Retriever(store, self.model.softmax_scale, self.trace)
            if self.on_retriever is not None:
                self.on_retriever(self.retriever, store)
        self.decoder = Decoder(self.runner, self.retriever, self.trace)

    def _start_prefill(self, request: Request) -> None:
        assert request.resident is not None
        device, block = self.model.device, request.block_length
        tokens, masked = first_block(request.prompt_ids, block, self.model.config.mask_token_id)
        request.tokens = torch.from_numpy(tokens).to(device)
        request.masked = torch.from_numpy(masked).to(device)
        request.draft = request.tokens
        request.block = request.prompt_blocks
        seed = request.params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        request.generator = request_generator(device, seed)
        retriever = self.retriever
        prefix = torch.tensor(request.prompt_ids[: request.prefix], dtype=torch.int64).to(device)
        request.prefill = PrefillTask(
            self.runner,
            request.resident,
            prefix,
            request.tokens,
            request.masked,
            self.config.prefill_chunk,
            None if retriever is None else partial(retriever.store_layer, request),
            self.offload.score_operator,
        )

    def _prefill(self, progress: ProgressCallback | None) -> list[Request]:
        request = self.scheduler.prefilling()
        if request is None:
            return []
        task = request.prefill
        assert task is not None
        units = self.scheduler.prefill_units()
        total = len(request.prompt_ids) * self.model.config.num_layers
        request.prefill_started = request.prefill_started or time.perf_counter()
        while not task.done and (units is None or units > 0) and not request.abort_requested:
            with self.trace.span("prefill", request.request_id):
                task.run_unit()
            units = None if units is None else units - 1
            if progress is not None:
                progress(Progress(request.request_id, "prefill", task.progress, total))
        if not task.done:
            return []
        assert task.logits is not None
        request.prefill = None
        request.phase = Phase.DECODE
        if request.resident is not None and request.resident.needs_selection(request.prefix):
            request.counters.rows_selected += request.resident.num_rows
        request.prefilled = time.perf_counter()
        self.decoder.commit([request], [task.logits])
        if progress is not None:
            progress(Progress(request.request_id, "prefill", total, total))
        return self._advance([request], progress)

    def _advance(self, requests: list[Request], progress: ProgressCallback | None) -> list[Request]:
        """After a step: close blocks that are finished, end requests, begin the next blocks."""
        news = []
        for request in requests:
            if request.error is not None:
                self._finish(request, "abort")
                news.append(request)
                continue
            assert request.tokens is not None and request.masked is not None
            tokens, masked = request.tokens.tolist(), request.masked.tolist()
            if self._block_done(request, tokens, masked):
                self._close_block(request, tokens, masked)
                news.append(request)
                if progress is not None:
                    done, total = len(request.output_ids), request.params.max_tokens
                    progress(Progress(request.request_id, "decode", done, total))
        return news

    def _block_done(self, request: Request, tokens: list[int], masked: list[bool]) -> bool:
        """No mask is left in the block, or none that could still change the output."""
        if not any(masked):
            return True
        begin = request.prompt_in_block
        end = min(len(request.prompt_ids) + request.params.max_tokens - request.prefix, len(tokens))
        for token, open_ in zip(tokens[begin:end], masked[begin:end], strict=True):
            if open_:
                return False
            if token in request.eos_token_ids:
                return True
        return True

    def _close_block(self, request: Request, tokens: list[int], masked: list[bool]) -> None:
        """Take a finished block's tokens; end the request or begin its next block."""
        assert request.tokens is not None and request.masked is not None
        fresh, open_ = tokens[request.prompt_in_block :], masked[request.prompt_in_block :]
        checker = request.checker
        reason = checker.append(fresh[: open_.index(True)] if True in open_ else fresh)
        request.counters.blocks += 1
        if request.counters.blocks == 1:
            request.first_block_done = time.perf_counter()
        request.output_ids, request.text = list(checker.token_ids), checker.text
        if reason is not None:
            self._finish(request, reason)
            return
        request.closed = request.tokens
        request.block += 1
        request.step = 0
        mask_id = self.model.config.mask_token_id
        request.tokens = torch.full_like(request.closed, mask_id)
        request.masked = torch.ones_like(request.masked)
        request.draft = request.tokens

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and give back what it holds, now or once nothing on its way can touch it."""
        request.finish_reason = reason
        request.finished_at = time.perf_counter()
        request.prefill = None
        self.scheduler.remove(request)
        with self._lock:
            self._requests.pop(request.request_id, None)
        if self.retriever is not None:
            self.retriever.retire(request)
        elif request.resident is not None:
            request.resident.release()

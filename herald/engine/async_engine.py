"""`AsyncEngine`: an engine in a thread of its own, for many callers of one event loop (or of several).

One thread runs the steps and nothing else touches the engine. Callers tokenise in a pool of threads, so that
a long prompt holds nobody up, put their requests into an inbox, and get news through their event loop. An
abort reaches the engine before its next step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from herald.config import check, is_whole
from herald.decode import StopChecker
from herald.engine.engine import Engine
from herald.engine.generation import Generation, News
from herald.engine.request import Phase, Request
from herald.engine.results import metrics_of
from herald.errors import EngineStopped, InvalidOption, QueueFull, RequestAborted
from herald.outputs import RequestOutput
from herald.sampling_params import SamplingParams
from herald.shutdown import end_at_exit
from herald.tokenizer import Tokenizer

# Text, token ids, or a function that makes ids in the tokenising pool (a chat template, say).
Prompt = str | Sequence[int] | Callable[[Tokenizer], list[int]]
Params = SamplingParams | Callable[[int], SamplingParams]

MAX_RETRY_SECONDS = 60

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """Where an engine stands.

    Attributes:
        num_running: requests that have memory: they prefill or decode.
        num_waiting: requests that are being tokenised or queue.
        kv_usage: share of the host pool's pages in use; without offload, of the arena's rows. Pages that are
            only remembered, to be shared, count as free.
        host_kv_bytes, host_pool_bytes: bytes of pages in use, and of all pages.
        steps: engine steps so far.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    host_kv_bytes: int
    host_pool_bytes: int
    steps: int


@dataclass(frozen=True)
class EngineHealth:
    """Whether an engine works.

    Attributes:
        seconds_in_step: since the last step ended while there was work to do; 0 when idle.
        error: what stopped it.
    """

    alive: bool
    seconds_in_step: float
    error: BaseException | None


class EngineObserver(Protocol):
    """Watches requests; called by the engine's thread, so it must be quick."""

    def progressed(self, request: Request, new_tokens: int) -> None:
        """A request has new output tokens."""

    def ended(self, request: Request) -> None:
        """A request is over, whatever the reason."""


class AsyncEngine:
    """Runs an engine in a thread.

    Args:
        engine: nobody else may use it from now on; `close` closes it.
        max_waiting: requests that may wait for a place among the ``max_num_seqs`` that run.
        tokenizer_threads: prompts that are tokenised at the same time.

    Attributes:
        observers: watch requests.
    """

    def __init__(self, engine: Engine, max_waiting: int = 256, tokenizer_threads: int = 2) -> None:
        check(is_whole(max_waiting) and max_waiting >= 0, "max_waiting", max_waiting, "use 0 or more")
        check(
            is_whole(tokenizer_threads) and tokenizer_threads >= 1,
            "tokenizer_threads",
            tokenizer_threads,
            "use 1 or more",
        )
        self.engine = engine
        self.max_waiting = max_waiting
        self.observers: list[EngineObserver] = []
        self._changed = threading.Condition()
        self._inbox: list[Generation] = []
        self._open: dict[str, Generation] = {}
        self._coming = 0  # requests that have a place and are not in the engine yet
        self._names: set[str] = set()  # of those among them that are not in `_open` yet
        self._refuses: EngineStopped | None = None
        self._closing = False
        self._error: BaseException | None = None
        self._steps = 0
        self._busy_since: float | None = None
        self._seconds = 0.0  # that a request takes from its arrival, a running mean
        self._count = 0
        self._encoders = ThreadPoolExecutor(tokenizer_threads, "herald-tokenize")
        self._decoders = ThreadPoolExecutor(1, "herald-detokenize")
        self._thread = threading.Thread(target=self._run, name="herald-engine", daemon=True)
        self._thread.start()
        end_at_exit("steps", self)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt: its output so far after each finished block. See `Generation`.

        Closing the iterator, or cancelling who waits for it, ends the request. Raises what `submit` raises.
        """
        (generation,) = await self.submit([prompt], [params or SamplingParams()], request_id)
        try:
            async for output in generation:
                yield output
        finally:
            generation.close()

    async def submit(
        self, prompts: Sequence[Prompt], params: Sequence[Params], request_id: str = ""
    ) -> list[Generation]:
        """Queue prompts, all of them or none.

        Args:
            prompts: one that occurs several times, as the same object, is tokenised once.
            params: one for each prompt, or a function that makes it of the prompt's number of tokens.
            request_id: of the first; the others get it with ``-1``, ``-2`` and so on.

        Raises:
            QueueFull: too many requests wait.
            EngineStopped: the engine takes no requests.
            PromptTooLong, InvalidOption, HostPoolTooSmall: a request could never run.
        """
        loop, arrived = asyncio.get_running_loop(), time.perf_counter()
        names = self._take_places(len(prompts), request_id)
        made: list[Generation] = []
        try:
            encoded = {id(p): await loop.run_in_executor(self._encoders, self.encode, p) for p in prompts}
            for name, prompt, each in zip(names, prompts, params, strict=True):
                ids, text = encoded[id(prompt)], prompt if isinstance(prompt, str) else None
                request, checker = await loop.run_in_executor(
                    self._encoders, self._new_request, ids, each, text, name
                )
                request.arrived = arrived
                made.append(Generation(request, checker, loop, self._decoders, self._leave))
        except BaseException:
            self._give_back_places(names)
            raise
        self._put(made)
        return made

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return prompt(tokenizer) if callable(prompt) else list(prompt)

    def abort(self, request_id: str) -> bool:
        """End a request before the next step; False for one that is not (or no longer) known. Thread-safe.

        Its last output has ``finish_reason="abort"``.
        """
        with self._changed:
            generation = self._open.get(request_id)
            if generation is None:
                return False
            generation.request.abort_requested = True
            self._changed.notify()
            return True

    def refuse(self, reason: EngineStopped) -> None:
        """Take no new requests; those under way go on."""
        with self._changed:
            self._refuses = self._refuses or reason

    def end_all(self, reason: EngineStopped) -> None:
        """As `refuse`, and end what is under way: its consumers get ``reason``."""
        self.refuse(reason)
        with self._changed:
            open_ = list(self._open.values())
        for generation in open_:
            news = News([], None, "abort", reason, metrics_of(generation.request))
            with suppress(RuntimeError):  # its loop is closed
                generation.loop.call_soon_threadsafe(generation.put, news)
            self.abort(generation.request_id)

    def stats(self) -> EngineStats:
        """Counts of now. Thread-safe."""
        engine = self.engine
        store, arena = engine.memory.store, engine.memory.arena
        if store is not None:
            pages = store.pool.allocator.num_pages
            free = store.pool.allocator.num_free + engine.memory.prefixes.num_idle
            page_bytes = engine.memory.layout.page_bytes
        else:
            pages, free, page_bytes = arena.capacity, arena.rows_free, 0
        return EngineStats(
            num_running=len(engine.scheduler.running),
            num_waiting=self._coming + len(engine.scheduler.waiting),
            kv_usage=(pages - free) / pages if pages else 0.0,
            host_kv_bytes=(pages - free) * page_bytes,
            host_pool_bytes=pages * page_bytes,
            steps=self._steps,
        )

    def health(self) -> EngineHealth:
        """Whether the engine works. Thread-safe."""
        since = self._busy_since
        seconds = 0.0 if since is None else time.monotonic() - since
        return EngineHealth(self._thread.is_alive() and self._error is None, seconds, self._error)

    def describe(self) -> dict[str, object]:
        """State for a log, without any text or token of a prompt."""
        requests = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        return {
            "health": repr(self.health()),
            "stats": repr(self.stats()),
            "under_way": len(self.engine.decoder.under_way),
            "requests": [
                f"{r.request_id} {r.phase.name} prompt={len(r.prompt_ids)} output={len(r.output_ids)} "
                f"block={r.block} step={r.step} left={r.left} unread={r.unread} "
                f"selection={r.selection is not None} waits={r.waits_since is not None}"
                for r in requests
            ],
        }

    async def close(self) -> None:
        """End all requests, their consumers with `EngineStopped`, and give all memory back. Idempotent."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """As `close`, without an event loop; not in the loop of a consumer."""
        self.stop()
        self._thread.join()
        self._encoders.shutdown()
        self._decoders.shutdown()

    def stop(self) -> None:
        """As `close_now`, without waiting."""
        self.end_all(EngineStopped("the engine was closed", "make a new one"))
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait until the engine's thread has ended, for so long at most."""
        self._thread.join(seconds)

    def _take_places(self, count: int, request_id: str) -> list[str]:
        """Ids of ``count`` requests that may wait or run now."""
        with self._changed:
            if self._refuses is not None:
                raise self._refuses
            scheduler = self.engine.scheduler
            seats = self.engine.config.max_num_seqs
            there = self._coming + len(scheduler.waiting) + len(scheduler.running)
            if there + count > seats + self.max_waiting:
                waiting = max(there - seats, 1)
                wait = math.ceil(self._seconds * waiting / seats)
                raise QueueFull(
                    f"{there} requests wait or run, of {seats + self.max_waiting} that may",
                    "try again later, or send fewer at a time",
                    min(max(wait, 1), MAX_RETRY_SECONDS),
                )
            self._count += 1
            first = request_id or f"request-{self._count}"
            names = [first, *(f"{first}-{number}" for number in range(1, count))]
            taken = next((name for name in names if name in self._open or name in self._names), None)
            if taken is not None:
                raise InvalidOption(f"request_id={taken!r} is in use", "choose another")
            self._coming += count
            self._names.update(names)
            return names

    def _give_back_places(self, names: list[str]) -> None:
        with self._changed:
            self._coming -= len(names)
            self._names.difference_update(names)

    def _new_request(
        self, ids: list[int], params: Params, text: str | None, name: str
    ) -> tuple[Request, StopChecker | None]:
        """A request, and what makes text of its tokens outside of the engine's thread."""
        if not isinstance(params, SamplingParams):
            params = params(len(ids))
        # Only stop strings need the text before the next step.
        with_text = bool(params.stop)
        request = self.engine.new_request(ids, params, text, name, with_text)
        tokenizer = self.engine.tokenizer
        if with_text or not tokenizer.available:
            return request, None
        return request, StopChecker(request.params, request.eos_token_ids, tokenizer.decode)

    def _put(self, made: list[Generation]) -> None:
        with self._changed:
            self._coming -= len(made)
            self._names.difference_update(generation.request_id for generation in made)
            if self._refuses is not None:
                raise self._refuses
            self._open |= {generation.request_id: generation for generation in made}
            self._inbox += made
            self._coming += len(made)
            self._changed.notify()

    def _leave(self, generation: Generation) -> None:
        """A consumer is done with its request, finished or not."""
        with self._changed:
            if self._open.pop(generation.request_id, None) is not None:
                generation.request.abort_requested = True
                self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                news = self._take_in() + self.engine.step()
                self._steps += 1
                self._busy_since = time.monotonic()
                self._deliver(news)
        except BaseException as error:
            logger.exception("a step failed")
            # Nothing is known of the engine's state any more: every request ends, and none is taken.
            self._error = error
            stopped = EngineStopped(f"a step failed ({type(error).__name__}: {error})", "start it again")
            stopped.__cause__ = error
            self.end_all(stopped)
        finally:
            self._busy_since = None
            try:
                self.engine.close()
            except Exception:
                # After an error of the device there may be nothing left that could be closed.
                logger.exception("the engine could not give everything back")

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._inbox or self.engine.has_work or self._closing):
                self._busy_since = None
                self._changed.wait()
            self._busy_since = self._busy_since or time.monotonic()
            return not self._closing

    def _take_in(self) -> list[Request]:
        """Queue what came in, after what was aborted has ended: an id may be used again."""
        with self._changed:
            inbox, self._inbox = self._inbox, []
            self._coming -= len(inbox)
            ended = self.engine.end_aborted() if inbox else []
            for generation in inbox:
                # What was given up before it came here stays outside: its id may be another's by now.
                if generation.request.abort_requested:
                    ended.append(_given_up(generation.request))
                else:
                    self.engine.enqueue(generation.request)
        return ended

    def _deliver(self, requests: list[Request]) -> None:
        """Tell observers and consumers what a step brought."""
        batches: defaultdict[asyncio.AbstractEventLoop, list[tuple[Generation, News]]] = defaultdict(list)
        for request in requests:
            finished = request.phase is Phase.FINISHED
            with self._changed:
                generation = self._open.get(request.request_id)
                if generation is not None and generation.request is not request:
                    generation = None
            if generation is not None:
                news = generation.take_news()
                batches[generation.loop].append((generation, news))
                for observer in self.observers:
                    observer.progressed(request, len(news.tokens))
            if finished:
                self._ended(request)
        for loop, batch in batches.items():
            with suppress(RuntimeError):  # the loop is closed; `_leave` or `close` ends its requests
                loop.call_soon_threadsafe(_put_all, batch)

    def _ended(self, request: Request) -> None:
        if not isinstance(request.error, RequestAborted):
            took = request.finished_at - request.arrived
            self._seconds = took if not self._seconds else 0.9 * self._seconds + 0.1 * took
        for observer in self.observers:
            observer.ended(request)


def _given_up(request: Request) -> Request:
    """End a request that the engine has not seen."""
    request.error = RequestAborted(f"request {request.request_id} was aborted")
    request.finish_reason, request.phase = "abort", Phase.FINISHED
    request.finished_at = time.perf_counter()
    return request


def _put_all(batch: list[tuple[Generation, News]]) -> None:
    for generation, news in batch:
        generation.put(news)

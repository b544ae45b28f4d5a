"""Life of the server: loading, ready, draining, ended."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum

from herald.async_llm import AsyncLLM
from herald.engine.reserve import USUAL_BLOCK
from herald.errors import EngineStopped
from herald.sampling_params import SamplingParams
from herald.serve.errors import unavailable
from herald.serve.watchdog import Watchdog
from herald.shutdown import PatientThread

# How long answers to requests that were ended may take to leave.
FAREWELL_SECONDS = 5.0
POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


class Stage(Enum):
    """Where a server stands."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class Lifecycle:
    """Loads the model, counts requests, ends them in order.

    Args:
        load: makes the model; runs in a thread of its own.
        drain_seconds: how long requests under way may go on.
        watchdog_seconds: a step that takes longer is reported; 0 for never.

    Attributes:
        error: why the model could not be loaded.
        on_end: called in the event loop when nothing is left to do.
        on_ready: called with the model before requests are taken.
    """

    def __init__(
        self, load: Callable[[], AsyncLLM], drain_seconds: float, watchdog_seconds: float = 0.0
    ) -> None:
        self.stage = Stage.LOADING
        self.error: BaseException | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.on_ready: list[Callable[[AsyncLLM], None]] = []
        self.drain_seconds = drain_seconds
        self.watchdog = Watchdog(watchdog_seconds) if watchdog_seconds else None
        self._load = load
        self._llm: AsyncLLM | None = None
        self._under_way = 0
        self._hurry = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The model.

        Raises:
            ApiError: 503 while it loads.
        """
        if self._llm is None:
            raise unavailable("the model is being loaded", "loading")
        return self._llm

    @property
    def requests_under_way(self) -> int:
        return self._under_way

    def start(self) -> None:
        """Begin to load; in the event loop."""
        self._loop = asyncio.get_running_loop()
        PatientThread(self._make, "herald-load").start()

    def check_open(self) -> None:
        """Raise `ApiError`, 503, unless requests are taken."""
        if self.stage is Stage.LOADING:
            raise unavailable("the model is being loaded", "loading")
        if self.stage is not Stage.READY:
            raise unavailable("the server is shutting down", "shutting_down")

    @contextmanager
    def under_way(self, counted: bool) -> Iterator[None]:
        """A request; `drain` waits for those that are counted."""
        self._under_way += counted
        try:
            yield
        finally:
            self._under_way -= counted

    def problem(self) -> str | None:
        """Why the server does not work, None where it does (or still loads)."""
        if self._llm is None:
            return None if self.error is None else f"the model could not be loaded: {self.error}"
        health = self._llm.health()
        if not health.alive:
            return f"the engine stopped: {health.error}"
        if self.watchdog is not None and health.seconds_in_step > self.watchdog.seconds:
            return f"a step has run for {health.seconds_in_step:.0f} s"
        return None

    def stop(self) -> None:
        """Drain; asked a second time, end everything at once. In the event loop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._hurry.set()

    async def close(self) -> None:
        """Give the model's memory back."""
        self.stage = Stage.ENDED
        if self.watchdog is not None:
            self.watchdog.close()
        if self._llm is not None:
            await self._llm.close()

    async def _drain(self) -> None:
        """Let requests under way end, for a while; then end them, each with an answer that says so."""
        was_ready = self.stage is Stage.READY
        self.stage = Stage.DRAINING
        logger.info("shutting down: %d requests under way", self._under_way)
        if was_ready:
            await self._wait_idle(self.drain_seconds)
            if self._under_way:
                logger.warning("ending %d requests that are still under way", self._under_way)
                reason = EngineStopped("the server is shutting down", "send the request to another one")
                self.llm.async_engine.end_all(reason)
                self._hurry.clear()
                await self._wait_idle(FAREWELL_SECONDS)
        self.on_end()

    async def _wait_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._under_way and time.monotonic() < deadline and not self._hurry.is_set():
            await asyncio.sleep(POLL_SECONDS)

    def _make(self) -> None:
        assert self._loop is not None
        llm = None
        # A loop that is closed has nobody left who waits for the model.
        with suppress(RuntimeError):
            try:
                start = time.perf_counter()
                llm = self._load()
                warm_up(llm)
                logger.info("loaded in %.1f s", time.perf_counter() - start)
            except BaseException as error:
                self._loop.call_soon_threadsafe(self._failed, error)
            else:
                self._loop.call_soon_threadsafe(self._made, llm)
                return
        if llm is not None:
            llm.async_engine.close_now()

    def _made(self, llm: AsyncLLM) -> None:
        if self.stage is Stage.ENDED:
            threading.Thread(target=llm.async_engine.close_now, name="herald-close").start()
            return
        self._llm = llm
        for call in self.on_ready:
            call(llm)
        if self.watchdog is not None:
            self.watchdog.start(llm.async_engine)
        if self.stage is Stage.LOADING:
            self.stage = Stage.READY

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.on_end()


def warm_up(llm: AsyncLLM) -> None:
    """One short answer, so that what is compiled at first use is compiled before the first client waits."""

    block = llm.llm.model.config.block_length or USUAL_BLOCK

    async def ask() -> None:
        token = 0 if llm.llm.model.config.mask_token_id else 1
        params = SamplingParams(max_tokens=2 * block, ignore_eos=True)
        prompt = [token] * min(2 * block, max(llm.max_model_len - 3 * block, 1))
        async for _ in llm.generate(prompt, params, "warm-up"):
            pass

    if llm.max_model_len >= 4 * block:
        asyncio.run(ask())

"""One request of an `AsyncEngine` as its consumer holds it: an async iterator of outputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from herald.decode import StopChecker
from herald.engine.request import Phase, Request
from herald.engine.results import metrics_of
from herald.errors import HeraldError, RequestAborted
from herald.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput


@dataclass(slots=True)
class News:
    """What a step brought a request.

    Attributes:
        tokens: of finished blocks.
        text: the output's text where stop strings were looked for, else None.
        error: why the request ended early.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason | None
    error: HeraldError | None
    metrics: RequestMetrics


class Generation(AsyncIterator[RequestOutput]):
    """A request under way. Iterating gives its output so far after each of its finished blocks.

    The last output has ``finished=True``. Blocks that were finished before anybody asked come as one. What
    ends the request early is raised, but for an abort, which is an output with ``finish_reason="abort"``.

    Args:
        request: of `herald.engine.engine.Engine.new_request`; the engine's thread alone may change it.
        checker: makes text of the tokens; None where the request's own does (stop strings) or nobody can.
        loop: of the consumer.
        decoders: where text is made.
        leave: ends the request in the engine, once.

    Attributes:
        sent: output tokens that were handed over so far; of the engine's thread.
    """

    def __init__(
        self,
        request: Request,
        checker: StopChecker | None,
        loop: asyncio.AbstractEventLoop,
        decoders: Executor,
        leave: Callable[[Generation], None],
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_token_ids = tuple(request.prompt_ids)
        self.loop = loop
        self.sent = 0
        self._checker = checker
        self._decoders = decoders
        self._leave = leave
        self._news: deque[News] = deque()
        self._arrived = asyncio.Event()
        self._tokens: list[int] = []
        self._text = ""
        self._over = False

    def take_news(self) -> News:
        """What is new since the last call; called by the engine's thread."""
        request = self.request
        tokens = request.output_ids[self.sent :]
        self.sent += len(tokens)
        finished = request.phase is Phase.FINISHED
        text = request.text if self._checker is None else None
        reason = request.finish_reason if finished else None
        return News(tokens, text, reason, request.error, metrics_of(request))

    def put(self, news: News) -> None:
        """Hand news over; called in the consumer's loop."""
        self._news.append(news)
        self._arrived.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        try:
            await self._arrived.wait()
            self._arrived.clear()
            news = self._news.popleft()
            while self._news and news.error is None:
                later = self._news.popleft()
                later.tokens[:0] = news.tokens
                news = later
            if news.error is not None and not isinstance(news.error, RequestAborted):
                raise news.error
            self._tokens += news.tokens
            if news.text is not None:
                self._text = news.text
            elif self._checker is not None and news.tokens:
                await self.loop.run_in_executor(self._decoders, self._checker.append, news.tokens)
                self._text = self._checker.text
        except BaseException:
            self.close()
            raise
        if news.finish_reason is not None:
            self.close()
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=(CompletionOutput(self._text, tuple(self._tokens), news.finish_reason),),
            finished=news.finish_reason is not None,
            prompt=self.request.prompt,
            metrics=news.metrics,
        )

    def close(self) -> None:
        """End the request if it is not finished; nothing comes after that. Idempotent."""
        if not self._over:
            self._over = True
            self._leave(self)

    async def aclose(self) -> None:
        """As `close`, for ``contextlib.aclosing``."""
        self.close()

    async def last(self) -> RequestOutput:
        """The finished output."""
        async for output in self:
            if output.finished:
                return output
        raise RequestAborted(f"request {self.request_id} was closed before it finished")

"""Answers as they are written: all at once, or piece by piece."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from herald.engine.generation import Generation
from herald.errors import EngineStopped
from herald.outputs import RequestOutput
from herald.serve.protocol import UsageIn
from herald.serve.responses import usage
from herald.serve.sse import DONE, event


class Answer(ABC):
    """How one call is answered.

    Args:
        name: id of the request.
        model: name the client gave.
        choices: completions of each prompt.
        usage_in: which events of a stream have token counts; the last one is an event of its own.
    """

    prefix: str
    kind: str
    piece_kind: str

    def __init__(self, name: str, model: str, choices: int, usage_in: UsageIn = "none") -> None:
        self.choices = choices
        self.usage_in = usage_in
        self._head = {"id": f"{self.prefix}-{name}", "created": int(time.time()), "model": model}

    @abstractmethod
    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """A whole completion."""

    @abstractmethod
    def piece(self, index: int, text: str, reason: str | None, first: bool) -> dict[str, Any]:
        """What a stream adds to a completion."""

    async def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """The answer once all completions are finished; closes them in any case."""
        async with aclosing(interleaved(generations)) as outputs:
            last = {index: output async for index, output in outputs}
        choices = [self.choice(i, last[i].outputs[0].text, _reason(last[i])) for i in sorted(last)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._counts(last)}

    async def stream(self, generations: list[Generation]) -> AsyncGenerator[bytes]:
        """Events of the answer; closes the completions in any case."""
        shown: dict[int, int] = {}
        latest: dict[int, RequestOutput] = {}
        async with aclosing(interleaved(generations)) as outputs:
            async for index, output in outputs:
                latest[index] = output
                text = output.outputs[0].text
                first = index not in shown
                fresh = text[shown.get(index, 0) :]
                if fresh or first:
                    shown[index] = len(text)
                    yield self._event(self.piece(index, fresh, None, first), latest)
                if output.finished:
                    yield self._event(self.piece(index, "", _reason(output), False), latest)
        if self.usage_in != "none":
            yield self._event(None, latest)
        yield DONE

    def _counts(self, outputs: dict[int, RequestOutput]) -> dict[str, Any]:
        """Token counts; a prompt counts once, with its first choice."""
        prompts = [outputs[i].metrics for i in sorted(outputs) if i % self.choices == 0]
        return usage(prompts, sum(len(output.token_ids) for output in outputs.values()))

    def _event(self, choice: dict[str, Any] | None, outputs: dict[int, RequestOutput]) -> bytes:
        data = {**self._head, "object": self.piece_kind, "choices": [] if choice is None else [choice]}
        if self.usage_in == "all" or (self.usage_in == "last" and choice is None):
            data["usage"] = self._counts(outputs)
        elif self.usage_in == "last":
            data["usage"] = None
        return event(data)


async def interleaved(generations: list[Generation]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index, output) of several requests as they come; all of them are closed at the end."""
    pending = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(generations)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                output = task.result()
                if not output.finished:
                    pending[asyncio.ensure_future(anext(generations[index]))] = index
                yield index, output
    finally:
        for each in generations:
            each.close()
        for task in pending:
            task.cancel()
        for task in pending:
            with suppress(asyncio.CancelledError, Exception):
                await task


def _reason(output: RequestOutput) -> str:
    """Why a finished completion ended, as clients know it."""
    reason = output.finish_reason
    if reason not in ("stop", "length"):
        raise EngineStopped(f"request {output.request_id} was aborted", "send it again")
    return reason

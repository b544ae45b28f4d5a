"""Server-sent events: chunks of an answer, comments while there is nothing to say, an end in any case."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from herald.serve.errors import as_api_error

DONE = b"data: [DONE]\n\n"
COMMENT = b": herald\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


def event(data: dict[str, Any]) -> bytes:
    """One event. ASCII only, so that no proxy can cut a character in two."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``work``, which is cancelled as soon as the client goes away.

    Args:
        receive: of the ASGI request, its body read.

    Raises:
        ClientGone: it went away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events until they end, fail, or the client goes away.

    Args:
        events: closed in every case. An error that it raises becomes an event of its own, the last one.
        keep_alive: seconds without an event after which a comment is sent; the first one is sent at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], keep_alive: float) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(ClientGone):
            await until_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            async for piece in _with_comments(self._events, self._keep_alive):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                logger.exception("a stream failed")
            await send({"type": "http.response.body", "body": event(failure.body()), "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_comments(events: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    yield COMMENT
    while True:
        following = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait({following}, timeout=seconds))[0]:
                yield COMMENT
            piece = following.result()
        except StopAsyncIteration:
            return
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError, Exception, StopAsyncIteration):
                await following
        yield piece

"""The gate before the routes: keys, readiness, body size, a line in the log. Pure ASGI, so that routes see a
client go away."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from herald.serve.errors import ApiError, as_api_error
from herald.serve.lifecycle import Lifecycle

# Paths of the interface proper; the others only look at the server.
GUARDED = ("/v1", "/tokenize", "/detokenize")
MAX_ID = 128

logger = logging.getLogger(__name__)
Count = Callable[[str, int], None]


class Gate:
    """Middleware of all requests.

    Args:
        app: what is behind it.
        lifecycle: says whether requests are taken, and counts those under way.
        api_keys: any of them opens the guarded paths; empty opens them to all.
        max_body_bytes: of a request.
        access_log: log a line for each request.
        count: called with the path's root and status of each response to a guarded path.
    """

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        api_keys: Sequence[str],
        max_body_bytes: int,
        access_log: bool,
        count: Count,
    ) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.max_body_bytes = max_body_bytes
        self.access_log = access_log
        self.count = count
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        guarded = any(scope["path"] == root or scope["path"].startswith(f"{root}/") for root in GUARDED)
        headers, start, status = Headers(scope=scope), time.perf_counter(), 0
        name = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = name

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            try:
                if guarded:
                    self._open(headers)
                    receive = await self._read(headers, receive)
                    self.lifecycle.check_open()  # the body may have taken its time
                with self.lifecycle.under_way(guarded):
                    await self.app(scope, receive, answer)
            except Exception as error:
                if not isinstance(error, ApiError):
                    logger.exception("request %s failed", name)
                if status:
                    raise
                refusal = as_api_error(error)
                scope["state"]["error"] = refusal.code
                await _refuse(refusal, answer)
        finally:
            if guarded:
                self.count(scope["path"], status)
            if self.access_log:
                client, code = scope.get("client") or ("-", 0), scope["state"].get("error")
                logger.info(
                    '%s "%s %s" %s%s %.3f s %s',
                    client[0],
                    scope["method"],
                    _path(scope),
                    status or "gone",
                    f" {code}" if code else "",
                    time.perf_counter() - start,
                    name,
                )

    def _open(self, headers: Headers) -> None:
        """Raise `ApiError` where a request may not come in."""
        if self._keys:
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1", "replace")
            # All keys are compared, each in constant time.
            matches = [hmac.compare_digest(given, each) for each in self._keys]
            if kind.lower() != "bearer" or not any(matches):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        self.lifecycle.check_open()

    async def _read(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body, up to the limit, and give it again."""
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.max_body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        body = b"".join(pieces)
        if body:
            _check_kind(headers)
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self.max_body_bytes:,} bytes; send less", code="body_too_large"
        )


def _check_kind(headers: Headers) -> None:
    """Raise `ApiError` for a body that is not said to be JSON: nobody would read it."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        sent = f"sent as {kind[:100]!r}" if kind else "sent without its kind"
        raise ApiError(
            400, f"the body is {sent}; send the header 'content-type: application/json'", code="invalid_json"
        )


async def _refuse(error: ApiError, send: Send) -> None:
    body = error.encoded()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _request_id(headers: Headers) -> str:
    """The client's own, where it is fit for a header and a log, else a new one."""
    given = headers.get("x-request-id", "")
    fit = 0 < len(given) <= MAX_ID and all(c.isascii() and (c.isalnum() or c in "-_.") for c in given)
    return given if fit else uuid.uuid4().hex


def _path(scope: Scope) -> str:
    """The path in printable characters, cut."""
    return str(scope["path"])[:200].encode("ascii", "backslashreplace").decode().replace("\n", "\\n")

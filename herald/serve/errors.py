"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from herald.errors import (
    EngineStopped,
    HeraldError,
    HostPoolTooSmall,
    PromptTooLong,
    QueueFull,
    ResidentSetTooSmall,
    UsageError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_SECONDS = 5


class ApiError(Exception):
    """What a client is told.

    Args:
        status: of the response.
        message: what is wrong, and what would work.
        kind: OpenAI's ``type``.
        code: for programs.
        param: the field at fault.
        headers: of the response besides its own.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The body as JSON in ASCII, whatever a client put into the names it is told about."""
        return json.dumps(self.body()).encode()


def unavailable(message: str, code: str) -> ApiError:
    """503: not now, but perhaps later."""
    return ApiError(503, message, SERVER_ERROR, code, headers={"retry-after": str(RETRY_SECONDS)})


def not_allowed(field: str, message: str) -> ApiError:
    """400: the value of a field is not one that this server takes."""
    return ApiError(400, message, code="invalid_value", param=field)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an error of the engine."""
    if isinstance(error, ApiError):
        return error
    field = error.field if isinstance(error, UsageError) else None
    if isinstance(error, (PromptTooLong, HostPoolTooSmall, ResidentSetTooSmall)):
        return ApiError(400, str(error), code="context_length_exceeded", param=field)
    if isinstance(error, QueueFull):
        retry = {"retry-after": str(error.retry_after)}
        return ApiError(429, str(error), "rate_limit_error", "queue_full", headers=retry)
    if isinstance(error, EngineStopped):
        return unavailable(str(error), "engine_stopped")
    if isinstance(error, UsageError):
        return ApiError(400, str(error), param=field, code="invalid_value")
    if isinstance(error, HeraldError):
        return ApiError(500, str(error), SERVER_ERROR, "generation_failed")
    return ApiError(500, "the server failed; its log says why", SERVER_ERROR, "internal_error")


@contextmanager
def told_by(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors of the engine as what a client is told, by the names of its own fields.

    Args:
        fields: the engine's name of a field -> the client's, where they differ. What is too much for the
            engine's memory is the prompt's fault.

    Raises:
        ApiError: for an error of this package.
    """
    try:
        yield
    except HeraldError as error:
        told = as_api_error(error)
        if told.param is None and told.code == "context_length_exceeded":
            told.param = "prompt"
        told.param = fields.get(told.param or "", told.param)
        raise told from error


def validation_error(problems: Sequence[Any]) -> ApiError:
    """400 for a body that does not fit its model: the first problem, by its field.

    Args:
        problems: of pydantic.
    """
    first = problems[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    kind, context = first["type"], first.get("ctx") or {}
    param = context.get("param") or ".".join(path) or None
    if kind == "json_invalid":
        return ApiError(400, f"the body is no valid JSON: {context.get('error', '')}", code="invalid_json")
    if kind == "extra_forbidden":
        message = f"{_shown(param)} is not a known field; leave it out"
        return ApiError(400, message, code="unknown_field", param=param)
    if kind == "missing":
        message = f"{_shown(param or 'a JSON body')} is required"
        return ApiError(400, message, code="missing_field", param=param)
    if kind in ("unsupported", "refused"):
        return ApiError(400, first["msg"], code=f"{kind}_value", param=param)
    return ApiError(400, f"{_shown(param or 'body')}: {first['msg']}", code="invalid_value", param=param)


def _shown(name: str | None) -> str:
    """A field's name, cut where a client made it long."""
    name = name or "the body"
    return name if len(name) <= 100 else f"{name[:97]}..."

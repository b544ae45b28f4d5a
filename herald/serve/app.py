"""The application: routes behind the gate, errors in one shape, an OpenAPI document that says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from herald import __version__
from herald.errors import HeraldError
from herald.serve import chat, completions, look
from herald.serve.config import ServeConfig
from herald.serve.context import ServeContext
from herald.serve.errors import ApiError, as_api_error, validation_error
from herald.serve.gate import Gate
from herald.serve.lifecycle import Lifecycle
from herald.serve.metrics import ServerMetrics
from herald.serve.responses import ErrorResponse

ERRORS = {
    400: "The request is wrong: the message names the field and what works.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says for how long.",
    500: "The server failed.",
    503: "The server is loading or shutting down.",
}


def build_app(config: ServeConfig, lifecycle: Lifecycle, model: str) -> FastAPI:
    """The ASGI application.

    Args:
        lifecycle: begins to load with the application's start, and is closed with its end.
        model: the model's own name.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        await lifecycle.close()

    app = FastAPI(
        title="HERALD",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A path with a slash at its end is another path: no redirects.
        redirect_slashes=False,
    )
    context = ServeContext(config, lifecycle, model)
    metrics = ServerMetrics(context.names[0])
    lifecycle.on_ready.append(metrics.watch)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": about} for status, about in ERRORS.items()
    }
    app.include_router(chat.routes(context, errors))
    app.include_router(completions.routes(context, errors))
    app.include_router(look.routes(context, metrics, errors))
    _answer_errors(app)
    app.add_middleware(
        Gate,
        lifecycle=lifecycle,
        api_keys=config.api_keys,
        max_body_bytes=config.max_body_bytes,
        access_log=config.access_log,
        count=metrics.responded,
    )
    _describe(app, bool(config.api_keys))
    return app


def _answer_errors(app: FastAPI) -> None:
    """Write every error in OpenAI's shape."""

    def written(request: Request, error: ApiError) -> Response:
        request.state.error = error.code  # for the log
        return Response(error.encoded(), error.status, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return written(request, validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message, code = str(error.detail), None
        if error.status_code == 404:
            message, code = "no such path; see /openapi.json", "no_such_path"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message, code = f"{request.method} is not allowed here; use {allowed}", "method_not_allowed"
        elif error.status_code == 400:
            # the framework's own: bytes that are no text, or nested too deep
            message, code = "the body cannot be read; send JSON in UTF-8", "invalid_json"
        return written(request, ApiError(error.status_code, message, code=code, headers=error.headers))

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return written(request, error)

    @app.exception_handler(HeraldError)
    async def engine(request: Request, error: HeraldError) -> Response:
        return written(request, as_api_error(error))


def _describe(app: FastAPI, has_keys: bool) -> None:
    """An OpenAPI document without the framework's 422, which is 400 here."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in made["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if has_keys and "401" in operation["responses"]:
                        operation["security"] = [{"key": []}]
            schemas = made.get("components", {}).get("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            if has_keys:
                made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]

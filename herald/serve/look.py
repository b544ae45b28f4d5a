"""Routes that look at the server: models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from herald.serve.chat import ChatPrompt
from herald.serve.context import ServeContext
from herald.serve.errors import not_allowed, told_by
from herald.serve.lifecycle import Stage
from herald.serve.metrics import ServerMetrics
from herald.serve.protocol import DetokenizeRequest, TokenizeRequest
from herald.serve.responses import ErrorResponse, ModelCard, ModelList, Status, Text, Tokens

UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": Status}}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ErrorResponse}}


def routes(
    context: ServeContext, metrics: ServerMetrics, errors: dict[int | str, dict[str, Any]]
) -> APIRouter:
    """The routes, with the responses that they may give besides."""
    router = APIRouter()
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "herald",
            "root": context.root,
            "max_model_len": context.llm.max_model_len,
        }

    @router.get("/v1/models", responses={**errors, 200: {"model": ModelList}})
    async def list_models() -> Response:
        """The names that requests may use."""
        return JSONResponse({"object": "list", "data": [card(name) for name in context.names]})

    @router.get("/v1/models/{model:path}", responses={**errors, **NOT_FOUND, 200: {"model": ModelCard}})
    async def retrieve_model(model: str) -> Response:
        """One of them."""
        return JSONResponse(card(context.model_named(model)))

    @router.post("/tokenize", responses={**errors, 200: {"model": Tokens}})
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation in the model's template."""
        context.model_named(body.model)
        tokenizer = context.llm.llm.tokenizer

        def work() -> dict[str, Any]:
            if body.messages is not None:
                with told_by({"prompt": "messages"}):
                    ids = ChatPrompt(body.messages, None)(tokenizer)
            else:
                ids = tokenizer.encode(body.prompt or "", body.add_special_tokens)
            strings = [tokenizer.decode([token], False) for token in ids] if body.return_token_strs else None
            return {
                "count": len(ids),
                "max_model_len": context.llm.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }

        return JSONResponse(await asyncio.to_thread(work))

    @router.post("/detokenize", responses={**errors, 200: {"model": Text}})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        context.model_named(body.model)
        llm = context.llm.llm
        vocabulary = llm.model.config.vocab_size
        bad = next((token for token in body.tokens if token >= vocabulary), None)
        if bad is not None:
            problem = f"token id {bad} is not in the vocabulary; use 0 to {vocabulary - 1}"
            raise not_allowed("tokens", problem)
        return JSONResponse({"prompt": await asyncio.to_thread(llm.tokenizer.decode, body.tokens, False)})

    @router.get("/health", responses={**UNAVAILABLE, 200: {"model": Status}})
    async def health() -> Response:
        """Whether the process works; it need not be ready."""
        problem = context.lifecycle.problem()
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    @router.get("/ready", responses={**UNAVAILABLE, 200: {"model": Status}})
    async def ready() -> Response:
        """Whether requests are taken."""
        problem = context.lifecycle.problem()
        takes = context.lifecycle.stage is Stage.READY and problem is None
        return JSONResponse({"status": problem or context.lifecycle.stage.value}, 200 if takes else 503)

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router

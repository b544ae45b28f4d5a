"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from herald.serve.answers import Answer
from herald.serve.context import ServeContext
from herald.serve.protocol import CompletionRequest
from herald.serve.responses import Completion

# New tokens of a completion that names no number, as OpenAI has it.
DEFAULT_TOKENS = 16


class TextAnswer(Answer):
    """The continuation of a text."""

    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def piece(self, index: int, text: str, reason: str | None, first: bool) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def routes(context: ServeContext, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The route, with the responses that it may give besides."""
    router = APIRouter()
    stream: dict[str, Any] = {"text/event-stream": {}}

    @router.post("/v1/completions", responses={**errors, 200: {"model": Completion, "content": stream}})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        model = context.model_named(body.model)
        answer = TextAnswer(request.state.request_id, model, body.choices, body.usage_in)
        return await context.answer(request, body, body.prompts(), answer, DEFAULT_TOKENS)

    return router

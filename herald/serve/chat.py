"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from herald.serve.answers import Answer
from herald.serve.context import ServeContext
from herald.serve.errors import ApiError
from herald.serve.protocol import ChatCompletionRequest, Message
from herald.serve.responses import ChatCompletion
from herald.tokenizer import Tokenizer

# Options of `Tokenizer.chat` that are the server's own.
RESERVED = ("tokenize", "add_generation_prompt", "conversation", "chat_template")


class ChatAnswer(Answer):
    """An answer of the assistant."""

    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def piece(self, index: int, text: str, reason: str | None, first: bool) -> dict[str, Any]:
        delta: dict[str, str] = {"role": "assistant"} if first else {}
        if reason is None:
            delta["content"] = text
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class ChatPrompt:
    """Makes the prompt of a conversation, where prompts are tokenised."""

    def __init__(self, messages: list[Message], options: dict[str, Any] | None) -> None:
        self.messages = [message.for_template() for message in messages]
        self.options = options or {}
        reserved = next((name for name in self.options if name in RESERVED), None)
        if reserved is not None:
            raise ApiError(
                400,
                f"chat_template_kwargs.{reserved} is the server's own; leave it out",
                code="refused_value",
                param="chat_template_kwargs",
            )

    def __call__(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.chat(self.messages, **self.options)


def routes(context: ServeContext, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The route, with the responses that it may give besides."""
    router = APIRouter()
    stream: dict[str, Any] = {"text/event-stream": {}}

    @router.post(
        "/v1/chat/completions", responses={**errors, 200: {"model": ChatCompletion, "content": stream}}
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation."""
        model = context.model_named(body.model)
        prompt = ChatPrompt(body.messages, body.chat_template_kwargs)
        answer = ChatAnswer(request.state.request_id, model, body.choices, body.usage_in)
        return await context.answer(request, body, [prompt], answer, context.config.max_tokens)

    return router

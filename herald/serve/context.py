"""What every route needs: the model, its names, the limits, and how a call becomes an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from herald.async_llm import AsyncLLM
from herald.engine.async_engine import Params, Prompt
from herald.engine.generation import Generation
from herald.engine.limits import output_room
from herald.engine.reserve import USUAL_BLOCK
from herald.sampling_params import SamplingParams
from herald.serve.answers import Answer
from herald.serve.config import ServeConfig
from herald.serve.errors import ApiError, not_allowed, told_by
from herald.serve.lifecycle import Lifecycle
from herald.serve.protocol import SamplingFields
from herald.serve.sse import ClientGone, EventStream, until_gone

# The client closed its connection before there was an answer (nginx's number for it).
CLIENT_GONE = 499


class ServeContext:
    """The server as its routes see it.

    Args:
        config: options.
        lifecycle: has the model once it is loaded.
        model: the model's own name.
    """

    def __init__(self, config: ServeConfig, lifecycle: Lifecycle, model: str) -> None:
        self.config = config
        self.lifecycle = lifecycle
        self.root = model
        self.names = config.served_model_names or (model,)

    @property
    def llm(self) -> AsyncLLM:
        return self.lifecycle.llm

    def model_named(self, name: str | None) -> str:
        """The name an answer carries.

        Raises:
            ApiError: 404, no such model.
        """
        if name is None or name in self.names:
            return name or self.names[0]
        known = ", ".join(self.names)
        raise ApiError(
            404,
            f"the model {name[:100]!r} does not exist; use {known}",
            code="model_not_found",
            param="model",
        )

    async def answer(
        self, request: Request, body: SamplingFields, prompts: Sequence[Prompt], answer: Answer, default: int
    ) -> Response:
        """Run a call and write its answer, whole or as a stream.

        Args:
            default: new tokens of a completion that names no number, cut to what the context leaves.
        """
        params = self._params(body, len(prompts), default)
        many = [prompt for prompt in prompts for _ in range(body.choices)]

        async def submit() -> list[Generation]:
            with told_by(body.names):
                return await self.llm.async_engine.submit(many, params, request.state.request_id)

        async def whole() -> dict[str, object]:
            return await answer.whole(await submit())

        try:
            if body.stream:
                generations = await until_gone(request.receive, submit())
                return EventStream(answer.stream(generations), self.config.keep_alive_seconds)
            return JSONResponse(await until_gone(request.receive, whole()))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)

    def _params(self, body: SamplingFields, prompts: int, default: int) -> Sequence[Params]:
        """Decoding options of every completion of a call.

        Raises:
            ApiError: more than the server allows.
        """
        self._check_limits(body, prompts)
        with told_by(body.names):
            each = body.params(body.max_tokens or default)
        if body.max_tokens is None:
            return [self._within_context(params) for params in each] * prompts
        return list(each) * prompts

    def _check_limits(self, body: SamplingFields, prompts: int) -> None:
        """Hold a call to what the server allows: it pays for what clients ask for.

        Raises:
            ApiError: 400, with what would be allowed.
        """
        config, limit = self.config, self.config.max_choices
        if prompts * body.choices > limit:
            asked = f"{prompts} prompts with n={body.choices} are more than {limit} completions"
            raise not_allowed("n", f"{asked}; ask for fewer")
        for name, most in (
            ("kv_budget", config.max_kv_budget or self.llm.llm.offload.kv_budget),
            ("denoising_steps", config.max_denoising_steps),
            ("max_post_steps", config.max_denoising_steps),
        ):
            value = getattr(body, name)
            if value is not None and value > most:
                raise not_allowed(name, f"{name}={value} is more than this server allows; use at most {most}")
        served = config.max_block_length or self.llm.llm.model.config.block_length or USUAL_BLOCK
        block = body.block_length
        if block is not None and served % block:
            lengths = ", ".join(str(each) for each in range(1, served + 1) if served % each == 0)
            raise not_allowed(
                "block_length", f"block_length={block} is not served here; use one of {lengths}"
            )

    def _within_context(self, params: SamplingParams) -> Callable[[int], SamplingParams]:
        """The options for a prompt of a length: as many new tokens as it leaves room for."""
        engine = self.llm.llm.engine

        def for_prompt(tokens: int) -> SamplingParams:
            room = output_room(engine.model.config, engine.max_model_len, tokens, params)
            return replace(params, max_tokens=max(min(params.max_tokens, room), 1))

        return for_prompt

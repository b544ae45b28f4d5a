"""Requests as clients send them: OpenAI's fields, and those of diffusion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from herald.sampling_params import Algorithm, CanvasCache, SamplingParams

MAX_STOPS = 16

# Fields of OpenAI, vLLM and SGLang that have one meaning here, with the values that say it. Others are
# refused by name, instead of giving an answer that is not what was asked for.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "metadata": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}


# Fields that `SamplingParams` has under the same name.
PASSED_ON = (
    *("max_tokens", "temperature", "top_p", "top_k", "ignore_eos"),
    *("denoising_steps", "confidence_threshold", "editing_threshold", "max_post_steps"),
    *("confidence_factor", "algorithm", "cache", "entropy_bound", "stop_entropy"),
    *("block_length", "sub_block_length", "kv_budget"),
)


def one_of(expected: str, deep: bool = False) -> WrapValidator:
    """Make one message of those that the members of a union give.

    Args:
        expected: what the field takes.
        deep: where a member fits but for something in it, say what that is.
    """

    def validate(value: Any, members: ValidatorFunctionWrapHandler) -> Any:
        try:
            return members(value)
        except ValidationError as error:
            inner = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
            if not deep or len(inner["loc"]) < 2:
                raise PydanticCustomError("no_member", "use {expected}", {"expected": expected}) from None
            problem = PydanticCustomError(inner["type"], "{message}", {"message": inner["msg"]})
            # The first part of a location is the member's name, which is no client's.
            line = InitErrorDetails(type=problem, loc=inner["loc"][1:], input=inner["input"])
            raise ValidationError.from_exception_data(error.title, [line]) from None

    return WrapValidator(validate)


class Body(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


UsageIn = Literal["none", "last", "all"]


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="With include_usage: counts so far in every event, as vLLM has them."
    )


class SamplingFields(Body):
    """Fields that completions and chat completions share."""

    model: str | None = Field(None, description="A name of /v1/models; the only model when left out.")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        None, description="0, the default, is greedy."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = Field(None, description="Completions of each prompt.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
        | None,
        one_of(f"a text that is not empty, or a list of at most {MAX_STOPS} of them"),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Has no effect.")
    top_k: Annotated[int, Field(ge=0)] | None = Field(None, description="Candidates kept, 0 for all.")
    ignore_eos: bool | None = None
    denoising_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Steps a block may take, 0 for one a position."
    )
    confidence_threshold: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["off"] | None,
        one_of('a probability, such as 0.9, or "off"'),
    ] = Field(
        None,
        description='Commit every position above it in a step, or "off" for a fixed number a step.',
    )
    editing_threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Replace committed tokens where others are likelier (LLaDA2.1)."
    )
    max_post_steps: Annotated[int, Field(ge=0)] | None = None
    confidence_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Commit as many as a factor of their confidence allows (LLaDA)."
    )
    entropy_bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Nats up to which tokens are accepted in a step (DiffusionGemma)."
    )
    stop_entropy: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="Mean nats below which a canvas is finished (DiffusionGemma)."
    )
    algorithm: Algorithm | None = Field(None, description="What ranks positions (Dream).")
    cache: CanvasCache | None = Field(None, description="Of a family with full attention.")
    block_length: Annotated[int, Field(ge=1)] | None = None
    sub_block_length: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Part of a block that is decoded at a time (Fast-dLLM v2)."
    )
    kv_budget: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Rows attended to / rows of the prefix, up to the server's limit."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        """Take out fields that mean nothing here, and refuse those that would mean something."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name not in UNSUPPORTED or name in cls.model_fields:
                kept[name] = value
            elif not _is_one_of(value, UNSUPPORTED[name]):
                raise PydanticCustomError(
                    "unsupported", "{param} is not supported; leave it out", {"param": name}
                )
        return kept

    @model_validator(mode="after")
    def _check_together(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "refused", "{param} is for streams; use stream=true", {"param": "stream_options"}
            )
        return self

    @property
    def names(self) -> dict[str, str]:
        """The client's names of the engine's fields, where they differ."""
        return {}

    @property
    def choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def usage_in(self) -> UsageIn:
        """Which events of a stream have token counts."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "all" if options.continuous_usage_stats else "last"

    def params(self, max_tokens: int) -> list[SamplingParams]:
        """Decoding options of each choice of a prompt; seeds count up from the one given.

        Args:
            max_tokens: where the client names none.

        Raises:
            InvalidOption: what pydantic cannot see.
        """
        given: dict[str, Any] = {"max_tokens": max_tokens}
        given |= {name: getattr(self, name) for name in PASSED_ON if getattr(self, name) is not None}
        if self.confidence_threshold == "off":
            given["confidence_threshold"] = None
        stop = self.stop or ()
        seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(self.choices)]
        return [SamplingParams(stop=stop, seed=seed, **given) for seed in seeds]


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether ``value`` is one of ``allowed``; False is not 0 here, but 0.0 is."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in allowed
    )  # fmt: skip


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | list[TextPart], one_of('a text, or a list of parts {"type": "text", "text": ...}', deep=True)
    ]
    name: str | None = Field(None, description="Has no effect.")

    def for_template(self) -> dict[str, str]:
        """Role and text as chat templates expect them."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = Field(
        None, description="Passed on to the model's chat template, such as enable_thinking."
    )

    @property
    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": limit}

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise PydanticCustomError(
                    "refused",
                    "{param} and max_completion_tokens differ; use one of them",
                    {"param": "max_tokens"},
                )
            self.max_tokens = self.max_completion_tokens
        return self


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]], Field(min_length=1)
        ],
        one_of("a text, token ids, or a list of texts or of token ids, none of the lists empty"),
    ] = Field(description="A text or token ids, or several of one kind.")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if one else list(prompt)


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``: one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("refused", "one of {param} and messages is needed", {"param": "prompt"})
        return self


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]

"""`AsyncLLM`: the Python interface for programs with an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

from herald.config import EngineConfig, OffloadConfig, check, is_whole
from herald.engine.async_engine import AsyncEngine, EngineHealth, EngineStats, Prompt
from herald.engine.reserve import reserve
from herald.llm import LLM
from herald.outputs import RequestOutput
from herald.sampling_params import SamplingParams


class AsyncLLM:
    """As `herald.LLM`, with an engine that runs in a thread of its own.

    Args:
        model, device, dtype, offload, engine, block_length, mask_token_id, seed, rope_scaling: as for
            `herald.LLM`.
        max_waiting: requests that may wait beside the ``max_num_seqs`` that run; more are refused.
        tokenizer_threads: prompts that are tokenised at the same time.
        reserve_tokens: prompt and output tokens, over all requests, for which memory is allocated at once, in
            requests of the longest length; None for as many as can run together and half of the free host
            memory holds. 0 lets memory follow the requests; it then grows only when none runs.

    Attributes:
        async_engine: the engine; `AsyncEngine.submit` queues several prompts at once.

    Raises:
        What `herald.LLM` raises, and HostPoolTooSmall or ResidentSetTooSmall for what cannot be reserved.

    Use it as an async context manager, or call `close`. Loading blocks: an event loop does it in a thread.
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        device: str = "auto",
        dtype: str = "auto",
        offload: OffloadConfig | None = None,
        engine: EngineConfig | None = None,
        block_length: int = 0,
        mask_token_id: int | None = None,
        seed: int | None = None,
        rope_scaling: str = "",
        *,
        max_waiting: int = 256,
        tokenizer_threads: int = 2,
        reserve_tokens: int | None = 0,
    ) -> None:
        check(
            reserve_tokens is None or (is_whole(reserve_tokens) and reserve_tokens >= 0),
            "reserve_tokens",
            reserve_tokens,
            "use 0 or more, or None for what the memory holds",
        )
        self.llm = LLM(model, device, dtype, offload, engine, block_length, mask_token_id, seed, rope_scaling)
        try:
            if reserve_tokens != 0:
                reserve(self.llm.engine, reserve_tokens)
            self.async_engine = AsyncEngine(self.llm.engine, max_waiting, tokenizer_threads)
        except BaseException:
            self.llm.close()
            raise

    @property
    def max_model_len(self) -> int:
        """Positions a request may use: prompt and output."""
        return self.llm.engine.max_model_len

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt: its output so far after each of its finished blocks, the last ``finished``.

        Args:
            prompt: text, token ids, or a function that makes ids of the tokenizer (in another thread).
            request_id: for `abort`; made up when empty.

        Raises:
            QueueFull, EngineStopped, PromptTooLong, InvalidOption, HostPoolTooSmall: when it is first asked.
            HeraldError: what ended the request.

        Closing the iterator, or cancelling who waits for it, ends the request before the next step.
        """
        return self.async_engine.generate(prompt, sampling_params, request_id)

    def abort(self, request_id: str) -> bool:
        """End a request before the next step; its last output has ``finish_reason="abort"``."""
        return self.async_engine.abort(request_id)

    def stats(self) -> EngineStats:
        """How many run and wait, and how full the host pool is."""
        return self.async_engine.stats()

    def health(self) -> EngineHealth:
        """Whether the engine works, and for how long its step has run."""
        return self.async_engine.health()

    async def close(self) -> None:
        """End all requests and give device and host memory back. Idempotent."""
        await self.async_engine.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

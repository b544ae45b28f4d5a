"""`herald.LLM` replaced by a stand-in that answers at once and records what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import herald
from herald.outputs import CompletionOutput, Progress, RequestMetrics, RequestOutput
from herald.sampling_params import SamplingParams

ANSWER = "402913 é"


class FakeTokenizer:
    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [1, *messages[0]["content"].encode(), 2]


class FakeLLM:
    """Records its arguments in `made`; `fail` is raised by `generate`; `chunks` are the texts streamed."""

    made: list[FakeLLM]
    answer = ANSWER
    fail: BaseException | None = None
    chunks: tuple[str, ...] = ("4029", "402913 \ufffd", ANSWER)
    noise = ""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[dict[str, Any]] = []
        self.closed = False
        self.tokenizer = FakeTokenizer()
        type(self).made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def generate(
        self,
        prompts: str | list[str] | None,
        sampling_params: SamplingParams,
        *,
        prompt_token_ids: list[list[int]] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        if self.noise:
            print(self.noise)
        if self.fail is not None:
            raise self.fail
        self.calls.append(
            {"prompts": prompts, "params": sampling_params, "prompt_token_ids": prompt_token_ids}
        )
        given = prompt_token_ids or [list(prompt.encode()) for prompt in prompts or []]
        for number in range(len(given)):
            if progress is not None:
                progress(Progress(str(number), "prefill", 5, 10))
                progress(Progress(str(number), "prefill", 10, 10))
                progress(Progress(str(number), "decode", 3, 8))
        return [self.output(number, ids, self.answer, True) for number, ids in enumerate(given)]

    def stream(
        self,
        prompt: str | None,
        sampling_params: SamplingParams,
        *,
        prompt_token_ids: list[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[RequestOutput]:
        self.calls.append({"prompt": prompt, "params": sampling_params, "prompt_token_ids": prompt_token_ids})
        ids = prompt_token_ids or list((prompt or "").encode())
        for number, text in enumerate(self.chunks, 1):
            yield self.output(0, ids, text, number == len(self.chunks))

    def output(self, number: int, prompt_ids: list[int], text: str, finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=str(number),
            prompt_token_ids=tuple(prompt_ids),
            outputs=(CompletionOutput(text, tuple(text.encode()), "stop" if finished else None),),
            finished=finished,
            metrics=RequestMetrics(
                prompt_tokens=len(prompt_ids),
                output_tokens=8,
                blocks=2,
                steps=7,
                decode_seconds=0.5,
                exposed_seconds=0.05,
                host_kv_bytes=3 << 20,
                rows_selected=1234567,
                rows_moved=4321,
            ),
        )


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """A fresh `FakeLLM` class in the place of `herald.LLM`, for one test."""
    kind = type("FreshFakeLLM", (FakeLLM,), {"made": []})
    # Into the dictionary: reading the old value, as `setattr` does, would load the real engine.
    monkeypatch.setitem(herald.__dict__, "LLM", kind)
    return kind

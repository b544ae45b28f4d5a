"""Answers through the official client equal those of `LLM`, whole and as streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from herald import LLM, SamplingParams
from herald.serve.protocol import PASSED_ON, ChatCompletionRequest, CompletionRequest
from tests.serve.support import ENGINE, OFFLOAD, Running, chat, raw_post, request

QUESTION = "The code of the harbour is 4711.\nQuestion: What is the code of the harbour?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", offload=OFFLOAD, engine=ENGINE) as model:
        yield model


def alone(llm: LLM, text: str, chat: bool, **params: Any) -> tuple[str, str, int, int]:
    """Text, reason, prompt tokens and output tokens of a prompt that runs by itself."""
    ids = llm.tokenizer.chat([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
    (output,) = llm.generate(prompt_token_ids=ids, sampling_params=SamplingParams(**params))
    first = output.outputs[0]
    return first.text, str(first.finish_reason), len(ids), len(first.token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40},
        {"max_completion_tokens": 33, "temperature": 0.0},
        {"max_tokens": 40, "temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"max_tokens": 40, "stop": "1", "extra_body": {"ignore_eos": True}},
        {"max_tokens": 40, "stop": ["\n", "e"], "extra_body": {"ignore_eos": True, "top_k": 3}},
        {"max_tokens": 40, "extra_body": {"confidence_threshold": "off", "denoising_steps": 4}},
        {"max_tokens": 40, "extra_body": {"confidence_threshold": 0.5, "kv_budget": 0.2, "ignore_eos": True}},
    ],
)
def test_chat_completions(client: openai.OpenAI, llm: LLM, fields: dict[str, Any]) -> None:
    params = {**fields, **fields.get("extra_body", {})}
    params.pop("extra_body", None)
    params["max_tokens"] = params.pop("max_completion_tokens", params.get("max_tokens"))
    if params.get("confidence_threshold") == "off":
        params["confidence_threshold"] = None
    text, reason, prompt_tokens, tokens = alone(llm, QUESTION, True, **params)

    messages: Any = chat(QUESTION)["messages"]
    whole = client.chat.completions.create(model="tiny", messages=messages, **fields)
    assert whole.choices[0].message.content == text and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == reason and whole.object == "chat.completion"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt_tokens, tokens)
    assert whole.usage.total_tokens == prompt_tokens + tokens

    stream = client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    )
    pieces = list(stream)
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == text
    reasons = [piece.choices[0].finish_reason for piece in pieces if piece.choices]
    assert reasons == [None] * (len(reasons) - 1) + [reason]
    assert [piece.usage is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
    assert len({piece.id for piece in pieces}) == 1 and pieces[0].object == "chat.completion.chunk"


def test_completions_of_several_prompts(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["One two three", "The harbour", "x"]
    expected = [alone(llm, prompt, False, max_tokens=20) for prompt in prompts]
    whole = client.completions.create(model="tiny", prompt=prompts, max_tokens=20)
    assert [(c.text, c.finish_reason) for c in whole.choices] == [each[:2] for each in expected]
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(each[2] for each in expected)
    assert whole.usage.completion_tokens == sum(each[3] for each in expected)
    by_ids = client.completions.create(
        model="tiny", prompt=[llm.tokenizer.encode(prompt) for prompt in prompts], max_tokens=20
    )
    assert [c.text for c in by_ids.choices] == [c.text for c in whole.choices]
    default = client.completions.create(model="tiny", prompt=prompts[0], extra_body={"ignore_eos": True})
    assert default.usage is not None and default.usage.completion_tokens == 16


def test_n_choices_have_seeds_of_their_own(client: openai.OpenAI, llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 7}
    expected = [alone(llm, "Hello", False, **{**fields, "seed": 7 + i})[0] for i in range(3)]
    whole = client.completions.create(model="tiny", prompt="Hello", n=3, **fields)
    assert [choice.text for choice in whole.choices] == expected and len(set(expected)) > 1
    texts = {0: "", 1: "", 2: ""}
    ends: list[int] = []
    for piece in client.completions.create(model="tiny", prompt="Hello", n=3, stream=True, **fields):
        texts[piece.choices[0].index] += piece.choices[0].text
        ends += [piece.choices[0].index] if piece.choices[0].finish_reason else []
    assert [texts[i] for i in range(3)] == expected and sorted(ends) == [0, 1, 2]


def test_the_async_client(server: Running, llm: LLM) -> None:
    texts = [f"{QUESTION} ({i})" for i in range(8)]
    expected = [alone(llm, text, True, max_tokens=24)[0] for text in texts]

    async def ask(client: openai.AsyncOpenAI, text: str, stream: bool) -> str:
        messages: Any = chat(text)["messages"]
        answer: Any = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=24, stream=stream
        )
        if not stream:
            return answer.choices[0].message.content
        return "".join([piece.choices[0].delta.content or "" async for piece in answer])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, text, i % 2 == 0) for i, text in enumerate(texts)))

    assert asyncio.run(all_of_them()) == expected


def test_counts_in_every_event(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "bc"], "stream": True, "max_tokens": 40, "ignore_eos": True, "n": 2}
    _, text = request("POST", f"{server.url}/v1/completions", {**body, "stream_options": options})
    counts = [json.loads(line[6:])["usage"] for line in text.split("\n\n") if line.startswith("data: {")]
    tokens = [each["completion_tokens"] for each in counts]
    assert tokens == sorted(tokens) and tokens[0] > 0 and tokens[-1] == 160
    assert counts[-1]["prompt_tokens"] == 3 and counts[-1]["total_tokens"] == 163


def test_a_stream_on_the_wire(server: Running) -> None:
    body = chat("Hello", stream=True, max_tokens=40, ignore_eos=True)
    status, text = request("POST", f"{server.url}/v1/chat/completions", body)
    assert status == 200
    events = text.split("\n\n")
    assert events[0].startswith(":"), "a comment before the request has its first block"
    assert events[-2:] == ["data: [DONE]", ""]
    data = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert all("usage" not in piece for piece in data)
    assert data[0]["choices"][0]["delta"]["role"] == "assistant"
    contents = [piece["choices"][0]["delta"].get("content") for piece in data]
    assert len([c for c in contents if c]) >= 2, "blocks come one by one"


def test_comments_keep_a_waiting_stream_alive(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go, engine = threading.Event(), server.engine
    step = engine.step

    def held(*arguments: Any) -> Any:
        go.wait(30)
        return step(*arguments)

    monkeypatch.setattr(engine, "step", held)
    with server.connect() as waiting:
        fields = {"prompt": "a", "stream": True, "max_tokens": 16, "ignore_eos": True}
        waiting.sendall(raw_post("/v1/completions", json.dumps(fields).encode()))
        received = b""
        while received.count(b": herald") < 4:
            received += waiting.recv(4096)
        assert b"data:" not in received and b"200 OK" in received
        go.set()
        while b"[DONE]" not in received:
            received += waiting.recv(4096)


def test_what_the_context_leaves_is_the_default(server: Running) -> None:
    limit = server.llm.max_model_len
    status, answer = server.post("/v1/chat/completions", chat("x" * (limit - 100), ignore_eos=True))
    assert status == 200
    usage = answer["usage"]
    assert usage["completion_tokens"] == limit - usage["prompt_tokens"] < 100


def test_models_and_tokens(server: Running, client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.model_extra is not None
    assert model.model_extra["max_model_len"] == server.llm.max_model_len
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="use tiny"):
        client.models.retrieve("gpt-4")
    ids = llm.tokenizer.encode("Grüße")
    status, tokens = server.post("/tokenize", {"prompt": "Grüße", "return_token_strs": True})
    assert status == 200 and tokens["tokens"] == ids and tokens["count"] == len(ids)
    assert len(tokens["token_strs"]) == len(ids) and tokens["max_model_len"] == server.llm.max_model_len
    assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "Grüße"})
    status, tokens = server.post("/tokenize", chat("Hello"))
    assert tokens["tokens"] == llm.tokenizer.chat([{"role": "user", "content": "Hello"}])
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": parts}]})[1] == tokens


def test_small_and_long_prompts_at_once(server: Running, llm: LLM) -> None:
    _mixed_load(server, llm, clients=12, short=200, long=1500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_64_clients_with_200_and_16k_tokens() -> None:
    from herald import EngineConfig
    from tests.serve.support import CONFIG, load_tiny, serving

    engine = EngineConfig(max_num_seqs=8, max_model_len=20_000)
    with LLM("tiny", device="cpu", offload=OFFLOAD, engine=engine) as llm:
        with serving(CONFIG, lambda: load_tiny(OFFLOAD, engine, reserve_tokens=70_000)) as running:
            _mixed_load(running, llm, clients=64, short=200, long=16_000)
            running.wait_idle()


def _mixed_load(server: Running, llm: LLM, clients: int, short: int, long: int) -> None:
    """Clients at once, some with a long prompt; each gets the answer that it gets alone."""
    words = "the quick brown fox jumps over the lazy dog and runs along the quay "

    def text(number: int) -> str:
        tokens = long if number % 8 == 5 else short
        return (f"{number} " + words * (tokens // len(words) + 1))[:tokens]

    fields = {"max_tokens": 32, "ignore_eos": True}
    answers: list[Any] = []

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(
            model="tiny", prompt=text(number), max_tokens=32, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == (long if number % 8 == 5 else short)
        return answer.choices[0].text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=3600
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(clients)))

    answers = asyncio.run(all_of_them())
    expected = [alone(llm, text(number), False, **fields)[0] for number in range(clients)]
    assert answers == expected


def test_every_option_of_a_request_is_there_or_has_a_reason() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    known = set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields)
    assert ours <= known, "an option that clients cannot reach"
    assert set(PASSED_ON) | {"seed", "stop"} == ours

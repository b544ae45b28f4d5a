"""What is refused, with which status, and that the server goes on."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from herald.errors import InvalidOption, NonFiniteLogits, UsageError
from herald.serve.config import ServeConfig
from herald.serve.errors import as_api_error
from herald.serve.protocol import UNSUPPORTED
from herald.serve.server import HeraldServer
from tests.serve.support import CONFIG, Running, chat, load_tiny, request, serving


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields_are_refused_by_name(server: Running, name: str) -> None:
    for path, body in (
        ("/v1/chat/completions", chat("Hello", max_tokens=1)),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}),
    ):
        status, answer = server.post(path, {**body, name: {"type": "other"}})
        error = answer["error"]
        assert status == 400 and error["param"] == name and error["code"] == "unsupported_value"
        assert name in error["message"] and error["type"] == "invalid_request_error"


def test_values_that_mean_nothing_are_taken(server: Running) -> None:
    neutral = {name: values[-1] for name, values in UNSUPPORTED.items()}
    assert server.post("/v1/chat/completions", chat("Hello", max_tokens=1, user="u", **neutral))[0] == 200
    status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 0})
    assert status == 400 and answer["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"colour": 1}, "colour", "unknown_field"),
        ({"messages": None}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_field"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages.0.tool_calls",
         "unknown_field"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "refused_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"top_p": 0.0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"seed": 10**30}, "seed", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "refused_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_field"),
        ({"kv_budget": 0.9}, "kv_budget", "invalid_value"),
        ({"denoising_steps": 10**30}, "denoising_steps", "invalid_value"),
        ({"denoising_steps": 1025}, "denoising_steps", "invalid_value"),
        ({"max_post_steps": 10**9}, "max_post_steps", "invalid_value"),
        ({"block_length": 64}, "block_length", "invalid_value"),
        ({"block_length": 10**30}, "block_length", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_value"),
        ({"confidence_threshold": "on"}, "confidence_threshold", "invalid_value"),
        ({"confidence_threshold": 1.5}, "confidence_threshold", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type",
         "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text",
         "missing_field"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
         "messages.0.content.0.y", "unknown_field"),
        ({"editing_threshold": 0.5}, "editing_threshold", "invalid_value"),
        ({"block_length": 24}, "block_length", "invalid_value"),
        ({"model": "gpt-4"}, "model", "model_not_found"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "refused_value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_wrong_fields(server: Running, fields: dict[str, Any], param: str, code: str) -> None:
    for stream in (False, True):
        asked = {**chat("Hello"), **fields, "stream": fields.get("stream", stream and "n" not in fields)}
        status, answer = server.post("/v1/chat/completions", asked)
        error = answer["error"]
        assert status == (404 if code == "model_not_found" else 400)
        assert (error["code"], error["param"]) == (code, param)
        assert error["message"] and error["type"] == "invalid_request_error"
        if "stream_options" in fields:
            break


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "a"], [-1], [10**6], [[1], "a"], {"a": 1}, 5, None, "\ud800"]
)
def test_wrong_prompts(server: Running, prompt: Any) -> None:
    status, answer = server.post("/v1/completions", {"prompt": prompt})
    error = answer["error"]
    assert status == 400 and (error["code"], error["param"]) == ("invalid_value", "prompt")
    # What the message says is about the prompt, not about one of the kinds that it could have been.
    told = ("no tokens", "is not in the vocabulary", "lone surrogate", "use a text, token ids, or a list")
    assert any(each in error["message"] for each in told)


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/"]
)
def test_a_body_that_is_not_said_to_be_json(server: Running, kind: str | None) -> None:
    body = json.dumps({"prompt": "a", "messages": [], "tokens": []}).encode()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        with server.connect() as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            head += "" if kind is None else f"content-type: {kind}\r\n"
            connection.sendall(head.encode() + b"\r\n" + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400") and b"content-type: application/json'" in answer


@pytest.mark.parametrize(
    "body",
    [b"{bad", b"\xff\xfe{", b'"\xff"', b"[" * 200_000, b'{"a":' * 50_000],
    ids=lambda body: str(body[:6]),
)
def test_bodies_that_nobody_can_read(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        status, text = request("POST", server.url + path, body)
        error = text["error"]
        assert (status, error["code"], error["type"]) == (400, "invalid_json", "invalid_request_error"), path
        assert "JSON" in error["message"]


def test_json_by_any_of_its_names(server: Running) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        body = {"prompt": "a", "max_tokens": 4}
        assert server.post("/v1/completions", body, {"content-type": kind})[0] == 200, kind


def test_divisors_of_the_block_length_are_served(server: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "block_length": 8, "denoising_steps": 1024}
    assert server.post("/v1/completions", body)[0] == 200
    status, answer = server.post("/v1/completions", {**body, "block_length": 24})
    assert status == 400 and "use one of 1, 2, 4, 8, 16" in answer["error"]["message"]


def test_a_prompt_that_is_too_long_is_told_the_numbers(server: Running, client: openai.OpenAI) -> None:
    limit = server.llm.max_model_len
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * limit, max_tokens=7, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        message = caught.value.message
        assert f"{limit:,}" in message and "max_tokens=7" in message and f"at most {limit - 7:,}" in message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"messages":', b"\xff\xfe", b'"text"', b"[" * 100_000, b"1" * 5000,
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "max_tokens": 1e999}'],
)  # fmt: skip
def test_bad_json(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        status, answer = request("POST", server.url + path, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_paths_and_methods(server: Running) -> None:
    for path in ("/v1/nothing", "/nothing", "/v1/completions/", "/health/"):
        status, answer = server.get(path)
        assert status == 404 and answer["error"]["code"] == "no_such_path"
    status, answer = server.get("/v1/completions")
    assert status == 405 and answer["error"]["code"] == "method_not_allowed"
    assert answer["error"]["message"] == "GET is not allowed here; use POST"
    assert server.post("/detokenize", {"tokens": [10**6]})[0] == 400
    assert server.post("/detokenize", {"tokens": [10**30]})[0] == 400
    assert server.post("/tokenize", {})[0] == 400
    assert server.post("/tokenize", {"prompt": "a", **chat("a")})[0] == 400


def test_a_body_of_100_mb(server: Running, client: openai.OpenAI) -> None:
    text = "x" * 100_000_000
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt=text, max_tokens=1)
    assert caught.value.status_code == 413 and "1,048,576" in caught.value.message
    # without a length, in chunks
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(40):
            connection.sendall(piece)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@contextmanager
def closing(event: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


@pytest.mark.parametrize(
    "key", [None, "Bearer wrong", "Bearer ", "secret-1", "Basic secret-1", "Bearer secret-1x"]
)
def test_keys(key: str | None) -> None:
    # no model is needed to look at a key
    config, ended = dataclasses.replace(CONFIG, api_keys=("secret-1", "secret-2")), threading.Event()

    def load() -> Any:
        ended.wait(20)
        raise InvalidOption("no model", "load one")

    with serving(config, load, wait=False) as running, closing(ended):
        headers = {} if key is None else {"authorization": key}
        for path in ("/v1/chat/completions", "/tokenize"):
            status, answer = running.post(path, chat("a"), headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        for right in ("Bearer secret-1", "bearer secret-2"):
            status, answer = running.post("/tokenize", chat("a"), {"authorization": right})
            assert status == 503 and answer["error"]["code"] == "loading"
        assert running.get("/health")[0] == 200 and running.get("/ready")[0] == 503
        assert running.get("/metrics")[0] == 200


def test_a_full_queue(server: Running) -> None:
    engine = server.llm.async_engine
    before, engine.max_waiting = engine.max_waiting, 2
    seats = engine.engine.config.max_num_seqs
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "confidence_threshold": "off"}
    try:
        with concurrent.futures.ThreadPoolExecutor(seats + 6) as pool:
            statuses = list(
                pool.map(lambda _: server.post("/v1/completions", body), range(seats + 6))
            )  # fmt: skip
    finally:
        engine.max_waiting = before
    refused = [answer for status, answer in statuses if status == 429]
    assert len(refused) >= 3 and [status for status, _ in statuses].count(200) >= seats
    assert all(answer["error"]["code"] == "queue_full" for answer in refused)


def test_a_full_queue_says_when_to_come_again(server: Running) -> None:
    engine = server.llm.async_engine
    before, engine.max_waiting = engine.max_waiting, 0
    many = ["a"] * (engine.engine.config.max_num_seqs + 1)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt=many)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    finally:
        engine.max_waiting = before


def test_an_error_in_mid_stream_is_an_event(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engine
    close = engine._close_block

    def fail(request: Any, block: int, tokens: list[int]) -> None:
        if request.request_id == "broken" and request.counters.blocks == 2:
            request.error = NonFiniteLogits("NaN logits", "check the weights")
            engine._finish(request, "abort")
        else:
            close(request, block, tokens)

    monkeypatch.setattr(engine, "_close_block", fail)
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(
        model="tiny", stream=True, extra_headers={"x-request-id": "broken"}, **body
    )
    pieces = []
    with pytest.raises(openai.APIError, match="NaN logits"):
        pieces += list(stream)
    status, text = request(
        "POST",
        f"{server.url}/v1/completions",
        {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True},
        {"x-request-id": "broken"},
    )
    *_, last, nothing = text.split("\n\n")
    assert status == 200 and nothing == "" and "[DONE]" not in text
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert text.count("data: {") >= 2, "what was there came before the error"
    status, answer = server.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 400, "ignore_eos": True}, {"x-request-id": "broken"}
    )
    assert status == 500 and answer["error"]["type"] == "server_error"


def test_a_bug_is_a_500_that_says_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(server.llm.llm.tokenizer, "encode", fail)
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
        status, answer = server.post("/v1/completions", body)
        assert status == 500 and "secret" not in json.dumps(answer)
        assert answer["error"]["code"] == "internal_error"


def test_logs_have_no_text(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "correcthorsebatterystaple"
    for body in (
        chat(secret, max_tokens=8),
        chat(secret, stream=True, max_tokens=8),
        chat(secret, max_tokens=10**9),
        chat(secret, unknown=secret),
        chat(secret, temperature=secret),
        {"messages": [{"role": secret, "content": secret}]},
    ):
        server.post("/v1/chat/completions", body)
    server.post("/v1/completions", {"prompt": secret, "max_tokens": 8})
    server.post("/tokenize", {"prompt": secret})
    request("POST", f"{server.url}/v1/completions", b"{" + secret.encode())
    logged = "\n".join(record.getMessage() + (record.exc_text or "") for record in caplog.records)
    assert "/v1/chat/completions" in logged and secret not in logged


def test_ids_of_requests_come_back(server: Running) -> None:
    import urllib.request

    def echoed(name: str) -> str:
        made = urllib.request.Request(f"{server.url}/health", headers={"x-request-id": name})
        with urllib.request.urlopen(made) as response:
            return response.headers["x-request-id"]

    assert echoed("mine-1.2_3") == "mine-1.2_3"
    for other in ("a b", "x" * 200, "\xe4", "a;b"):
        assert len(echoed(other)) == 32


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000}, {"port": "x"}, {"api_keys": "key"}, {"api_keys": ("",)}, {"api_keys": ("k\n",)},
        {"served_model_names": ["a"]}, {"max_waiting": -1}, {"max_body_bytes": 0}, {"max_choices": 0},
        {"max_tokens": 0}, {"max_kv_budget": 2.0}, {"max_block_length": -1}, {"max_denoising_steps": 0},
        {"keep_alive_seconds": 0.0}, {"drain_seconds": -1.0},
        {"watchdog_seconds": -1.0}, {"access_log": 1}, {"host": 5},
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))) as caught:
        ServeConfig(**options)
    assert "k\n" not in str(caught.value)


def test_an_address_in_use(server: Running) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
        HeraldServer(dataclasses.replace(CONFIG, port=port), load_tiny, "tiny")


def test_other_errors_are_the_servers() -> None:
    assert as_api_error(ValueError("a secret")).status == 500
    assert "secret" not in as_api_error(ValueError("a secret")).message

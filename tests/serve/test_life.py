"""From the first connection to the last: loading, draining, signals, steps that hang, engines that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from herald.cli.main import main
from herald.errors import InvalidOption
from herald.serve.lifecycle import Stage
from tests.serve.support import CONFIG, load_tiny, raw_post, request, serving, until_ready
from tests.serve.test_clients_that_leave import begin, hang_up, until

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    *("--model", "tiny", "--device", "cpu", "--port", "0", "--max-num-seqs", "2", "--max-model-len", "4096"),
    *("--reserve-tokens", "8192", "--kv-budget", "0.3"),
]


class Process:
    """``herald serve`` in a process of its own."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "herald", "serve", *OPTIONS, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    @property
    def text(self) -> str:
        return "".join(self.log)

    def url(self) -> str:
        until(lambda: "listening on" in self.text, 60)
        return re.findall(r"listening on (http://\S+)", self.text)[0]

    def end(self, seconds: float = 30.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join()
        return code


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for each in started:
        each.process.kill()
        each.end()


def test_sigterm_lets_requests_end(processes: list[Process]) -> None:
    process = Process("--drain-seconds", "60", "--api-key", "k")
    processes.append(process)
    url = process.url()
    until_ready(url)

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        answer: Any = await client.completions.create(
            model="tiny", prompt=f"{number}", max_tokens=64, stream=number % 2 == 0,
            extra_body={"ignore_eos": True, "confidence_threshold": "off"},
        )  # fmt: skip
        if number % 2:
            assert answer.usage.completion_tokens == 64
            return answer.choices[0].finish_reason
        return [piece.choices[0].finish_reason async for piece in answer][-1]

    async def under_load() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            tasks = [asyncio.ensure_future(ask(client, number)) for number in range(6)]
            await asyncio.sleep(0.3)
            process.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert await asyncio.to_thread(request, "GET", f"{url}/health") == (200, {"status": "ok"})
            assert await asyncio.to_thread(request, "GET", f"{url}/ready") == (503, {"status": "draining"})
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                await client.completions.create(model="tiny", prompt="late")
            assert caught.value.status_code == 503 and int(caught.value.response.headers["retry-after"]) > 0
            assert await asyncio.gather(*tasks) == ["length"] * 6

    asyncio.run(asyncio.wait_for(under_load(), 90))
    assert process.end() == 0
    assert "shutting down: 6 requests under way" in process.text


def test_sigterm_ends_what_does_not(processes: list[Process]) -> None:
    process = Process("--drain-seconds", "0.5", HERALD_API_KEY="k")
    processes.append(process)
    url = process.url()
    until_ready(url)
    assert request("GET", f"{url}/v1/models")[0] == 401
    outcomes: list[Any] = []

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        try:
            answer: Any = await client.completions.create(
                model="tiny", prompt=f"{number}", max_tokens=3500, stream=number % 2 == 0,
                extra_body={"ignore_eos": True, "confidence_threshold": "off"},
            )  # fmt: skip
            async for _ in answer:
                pass
            outcomes.append("finished")
        except openai.APIError as error:
            outcomes.append(error)

    async def under_load() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            tasks = [asyncio.ensure_future(ask(client, number)) for number in range(6)]
            await asyncio.sleep(0.5)
            process.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)

    start = time.monotonic()
    asyncio.run(asyncio.wait_for(under_load(), 60))
    assert process.end() == 0 and time.monotonic() - start < 30
    assert len(outcomes) == 6
    for error in outcomes:
        assert isinstance(error, openai.APIError) and "shutting down" in error.message, error
    assert [getattr(error, "status_code", None) for error in outcomes].count(503) == 3


def test_a_signal_while_loading_ends_at_once(processes: list[Process]) -> None:
    process = Process()
    processes.append(process)
    process.url()
    process.process.send_signal(signal.SIGINT)
    assert process.end(20) == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--model", "/nothing/here"], 2, "/nothing/here"),
        (["--max-kv-budget", "2"], 2, "--max-kv-budget=2.0"),
        (["--host", "no.such.host.invalid"], 2, "cannot listen"),
        (["--host-memory", "1KiB"], 1, "host pool"),
    ],
)
def test_what_cannot_start(
    capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    assert main(["serve", *OPTIONS, *options]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("herald: error:") and message in last


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "herald.serve.server", None)  # type: ignore[arg-type]
    assert main(["serve", *OPTIONS]) == 2
    assert "pip install 'herald-dllm[serve]'" in capsys.readouterr().err


def test_503_until_ready() -> None:
    go = threading.Event()

    def load() -> Any:
        go.wait(30)
        return load_tiny()

    with serving(CONFIG, load, wait=False) as running:
        status, answer = running.post("/v1/completions", {"prompt": "a"})
        assert status == 503 and answer["error"]["code"] == "loading"
        assert running.get("/ready") == (503, {"status": "loading"})
        assert running.get("/health") == (200, {"status": "ok"})
        assert running.get("/v1/models")[0] == 503
        assert "herald:overlap_ratio" in running.get("/metrics")[1]
        go.set()
        until_ready(running.url)
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
    assert running.server.lifecycle.stage is Stage.ENDED


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Any:
        raise InvalidOption("no such thing", "use another")

    with serving(CONFIG, load, wait=False) as running:
        running.thread.join(20)
        assert not running.thread.is_alive()
    assert isinstance(running.server.lifecycle.error, InvalidOption)


def test_a_second_signal_ends_requests_at_once() -> None:
    config = dataclasses.replace(CONFIG, drain_seconds=60.0)
    with serving(config) as running:
        connection = begin(running, "a", stream=True)
        until(lambda: running.llm.stats().num_running == 1)
        running.server.stop()
        until(lambda: running.server.lifecycle.stage is Stage.DRAINING)
        running.server.stop()
        received = b""
        while piece := connection.recv(65536):
            received += piece
        assert b"shutting down" in received and b"[DONE]" not in received
        hang_up(connection)


def test_half_a_request_holds_no_shutdown_up() -> None:
    """A client that never sends the rest of its body is none of those that a drain waits for."""
    config = dataclasses.replace(CONFIG, drain_seconds=60.0)
    with serving(config) as running:
        whole = raw_post("/v1/completions", json.dumps({"prompt": "a" * 100}).encode())
        connections = [running.connect() for _ in range(3)]
        for connection, length in zip(connections, (20, 80, len(whole) - 1), strict=True):
            connection.sendall(whole[:length])
        time.sleep(0.1)
        start = time.monotonic()
        running.server.stop()
        connections[2].sendall(whole[-1:])  # the rest comes too late
        running.thread.join(30)
        assert not running.thread.is_alive() and time.monotonic() - start < 20
        received = connections[2].recv(65536)
        assert not received or b" 503 " in received
        for connection in connections:
            hang_up(connection)


def test_a_step_that_hangs_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CONFIG, watchdog_seconds=0.2)
    go = threading.Event()
    with serving(config) as running:
        engine, secret = running.engine, "correcthorsebattery"
        step = engine.step

        def hang(*arguments: Any) -> Any:
            news = step(*arguments)
            go.wait(20)
            return news

        monkeypatch.setattr(engine, "step", hang)
        connection = begin(running, secret)
        until(lambda: any("no step ended" in r.getMessage() for r in caplog.records))
        status, answer = running.get("/health")
        assert status == 503 and "a step has run" in answer["status"]
        assert running.get("/ready")[0] == 503
        (report,) = [r.getMessage() for r in caplog.records if "no step ended" in r.getMessage()]
        assert "herald-engine" in report or "async_engine.py" in report
        assert "PREFILL" in report or "DECODE" in report or "WAITING" in report
        assert secret not in report
        time.sleep(0.5)
        assert sum("no step ended" in r.getMessage() for r in caplog.records) == 1, "once a step"
        go.set()
        until(lambda: running.get("/health")[0] == 200)
        hang_up(connection)


def test_an_engine_that_fails_is_no_longer_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as running:

        def fail(*arguments: Any) -> Any:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(running.engine, "step", fail)
        for stream in (False, True):
            status, answer = running.post("/v1/completions", {"prompt": "a", "stream": stream})
            text = json.dumps(answer)
            assert (status == 503 or stream) and "the device is lost" in text
        status, answer = running.get("/health")
        assert status == 503 and "the device is lost" in answer["status"]


def test_threads_end_with_the_server() -> None:
    before = set(threading.enumerate())
    with serving() as running:
        running.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
    assert not {thread.name for thread in set(threading.enumerate()) - before}

"""Servers on real sockets, in threads of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from herald import AsyncLLM, EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.serve.config import ServeConfig
from herald.serve.server import HeraldServer

OFFLOAD = OffloadConfig(kv_budget=0.3, min_resident_rows=64)
ENGINE = EngineConfig(max_num_seqs=4, max_model_len=2048)
CONFIG = ServeConfig(port=0, max_waiting=64, max_body_bytes=2**20, keep_alive_seconds=0.1)


def load_tiny(offload: OffloadConfig = OFFLOAD, engine: EngineConfig = ENGINE, **options: Any) -> AsyncLLM:
    options = {"reserve_tokens": 4 * (engine.max_model_len or 2048), **options}
    return AsyncLLM("tiny", device="cpu", offload=offload, engine=engine, **options)


@dataclass
class Running:
    """A server that runs."""

    server: HeraldServer
    thread: threading.Thread

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def llm(self) -> AsyncLLM:
        return self.server.lifecycle.llm

    @property
    def engine(self) -> Engine:
        return self.llm.llm.engine

    def get(self, path: str) -> tuple[int, Any]:
        return request("GET", self.url + path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return request("POST", self.url + path, body, headers)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until the server has no request, and the engine owns nothing."""
        deadline = time.monotonic() + seconds
        while (owned := self.owned()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not owned, owned

    def owned(self) -> dict[str, Any]:
        """What requests hold now."""
        engine, stats = self.engine, self.llm.stats()
        owned: dict[str, Any] = {
            "requests": self.server.lifecycle.requests_under_way,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "pages": stats.host_kv_bytes,
            "arena rows": engine.memory.arena.capacity - engine.memory.arena.rows_free,
            "lanes": sum(
                engine.config.max_num_seqs - len(table._free) for table in engine.decoder._tables.values()
            ),
            "open": len(self.llm.async_engine._open),
        }
        return {name: value for name, value in owned.items() if value}


@contextmanager
def serving(
    config: ServeConfig = CONFIG, load: Callable[[], AsyncLLM] = load_tiny, wait: bool = True
) -> Iterator[Running]:
    """A server that is ready, and is stopped in the end."""
    server = HeraldServer(config, load, "tiny")
    thread = threading.Thread(target=server.run, args=(server._sockets,), name="server")
    thread.start()
    running = Running(server, thread)
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if wait:
            until_ready(running.url)
        yield running
    finally:
        server.stop()
        server.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


def until_ready(url: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if request("GET", url + "/ready")[0] == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "the server is not ready"
        time.sleep(0.05)


def request(
    method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of a response (its text where it is no JSON)."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json", **(headers or {})}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, sent, method=method), timeout=120
        ) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """Body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def raw_post(path: str, body: bytes) -> bytes:
    """A request as it goes over a socket."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

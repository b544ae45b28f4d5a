"""A client that goes away, in any phase, frees what its request holds within one step."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from herald.engine.async_engine import AsyncEngine
from herald.engine.request import Phase, Request
from tests.serve.support import Running, raw_post

LONG: dict[str, Any] = {"max_tokens": 1200, "ignore_eos": True, "confidence_threshold": "off"}


def hang_up(connection: socket.socket, rudely: bool = False) -> None:
    """Close a connection; rudely: with a reset."""
    if rudely:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def begin(server: Running, prompt: str, **fields: Any) -> socket.socket:
    connection = server.connect()
    connection.sendall(raw_post("/v1/completions", json.dumps({"prompt": prompt, **LONG, **fields}).encode()))
    return connection


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


class Ends:
    """The step in which each request ended."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.steps: dict[Request, int] = {}

    def progressed(self, request: Request, new_tokens: int) -> None:
        pass

    def ended(self, request: Request) -> None:
        self.steps[request] = self._engine.stats().steps


@pytest.mark.parametrize("rudely", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.DECODE])
def test_in_every_phase(
    server: Running, monkeypatch: pytest.MonkeyPatch, phase: Phase, stream: bool, rudely: bool
) -> None:
    scheduler, engine = server.engine.scheduler, server.llm.async_engine
    leave, seen = engine._leave, []

    def noted(generation: Any) -> None:
        seen.append((generation.request, server.llm.stats().steps))
        leave(generation)

    monkeypatch.setattr(engine, "_leave", noted)
    watch = Ends(engine)
    engine.observers.append(watch)
    others = []
    if phase is Phase.WAITING:
        others = [begin(server, f"other {i}") for i in range(server.engine.config.max_num_seqs)]
        # Seats or memory are taken, so whoever comes next queues.
        until(lambda: len(scheduler.running) + len(scheduler.waiting) == len(others))
    connection = begin(server, "mine " + "x" * (600 if phase is Phase.PREFILL else 10), stream=stream)
    mine: list[Any] = []

    def found() -> bool:
        there = [*scheduler.running, *scheduler.waiting]
        mine[:] = [r for r in there if r.prompt and r.prompt.startswith("mine") and r.phase is phase]
        return bool(mine)

    until(found)
    hang_up(connection, rudely)
    until(lambda: mine[0].phase is Phase.FINISHED)
    assert mine[0].finish_reason == "abort"
    (steps,) = [steps for request, steps in seen if request is mine[0]]
    until(lambda: mine[0] in watch.steps)
    # One step was under way when the server saw the client leave, and the next one ended it.
    assert watch.steps[mine[0]] - steps <= 2
    engine.observers.remove(watch)
    for other in others:
        hang_up(other)
    server.wait_idle()


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_at_random_moments(server: Running, count: int) -> None:
    rng = random.Random(count)
    plans = [(rng.random() * 0.4, rng.randrange(1, 900), rng.random() < 0.5) for _ in range(count)]

    def leave(plan: tuple[float, int, bool]) -> None:
        seconds, length, stream = plan
        connection = begin(server, "y" * length, stream=stream)
        time.sleep(seconds)
        hang_up(connection, rudely=length % 2 == 0)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, plans[:20]))
    server.wait_idle()
    threads = threading.active_count()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, plans[20:]))
    server.wait_idle()
    assert threading.active_count() <= threads
    status, answer = server.post("/v1/completions", {"prompt": "still here", "max_tokens": 8})
    assert status == 200 and answer["choices"]


def test_half_a_request_holds_nothing(server: Running) -> None:
    whole = raw_post("/v1/completions", json.dumps({"prompt": "a" * 1000, **LONG}).encode())
    connections = []
    for length in (10, 60, 200, len(whole) - 1):
        connection = server.connect()
        connection.sendall(whole[:length])
        connections.append(connection)
    time.sleep(0.1)
    assert server.llm.stats().num_waiting == server.llm.stats().num_running == 0
    for connection in connections:
        hang_up(connection)


def test_the_others_of_a_call_end_with_it(server: Running) -> None:
    connection = begin(server, "mine", n=6, stream=True)
    scheduler = server.engine.scheduler
    until(lambda: len(scheduler.running) + len(scheduler.waiting) == 6 and scheduler.running)
    assert len(scheduler.waiting) >= 2
    hang_up(connection)
    server.wait_idle()

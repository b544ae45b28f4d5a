"""Memory of an engine: sizes that fit any request, room given back, errors that reach the request."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.bounce import BounceBuffers, Sent
from herald.engine.engine import Engine
from herald.errors import InvalidOption, RetrievalFailed, UsageError
from herald.models import load_model
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from herald.transfer.threads import HostTicket
from tests.engine.conftest import DENSE, GOLDEN, MakeEngine
from tests.engine.support import random_prompt, run, tokens

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_requests_within_one_block(make_engine: MakeEngine, offload: OffloadConfig) -> None:
    """A prompt and an output that share one block need no resident row: they run, one after the other too."""
    engine = make_engine("sdar_b8", offload)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    first = tokens(run(engine, [[1, 2, 3], [4]], params))
    assert [len(t) for t in first] == [3, 3]
    assert tokens(run(engine, [[1, 2, 3], [4]], params)) == first
    assert len(tokens(run(engine, [random_prompt(200, 1)], PARAMS))[0]) == 44
    assert tokens(run(engine, [[1, 2, 3], [4]], params)) == first


def test_a_longer_request_grows_arena_and_pool(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", SPARSE)
    prompts = [random_prompt(n, n) for n in (60, 400, 90, 900)]
    alone = [tokens(run(make_engine("sdar_b8", SPARSE), [p], PARAMS))[0] for p in prompts]
    capacities = []
    for prompt, expected in zip(prompts, alone, strict=True):
        assert tokens(run(engine, [prompt], PARAMS)) == [expected]
        capacities.append(engine.memory.arena.capacity)
    assert capacities[0] < capacities[1] == capacities[2] < capacities[3]
    engine.close()
    assert engine.memory.arena.capacity == 0 and engine.memory.store is None


def test_the_page_size_suits_any_block_length() -> None:
    path = GOLDEN / "sdar_b8"
    model = load_model(path, torch.device("cpu"), torch.float32, block_length=24)
    engine = Engine(model, Tokenizer(path), OffloadConfig(kv_budget=1.0), EngineConfig())
    assert engine.memory.layout.page_size % 24 == 0
    run(engine, [random_prompt(100, 1)], PARAMS)
    engine.close()
    with pytest.raises(InvalidOption, match="page_size=40"):
        Engine(model, Tokenizer(path), OffloadConfig(page_size=40), EngineConfig())


@pytest.mark.parametrize("method", ["append_span", "append_block"])
def test_an_error_of_the_index_reaches_the_caller(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine("sdar_b8", SPARSE)

    def broken(*args: object, **options: object) -> None:
        raise OSError("the index broke")

    engine.on_retriever = lambda retriever, store: setattr(store.index, method, broken)
    with pytest.raises(RetrievalFailed, match="the index broke"):
        run(engine, [random_prompt(300, 5)], PARAMS)


class SlowRows:
    """Rows whose shape takes long to read, so that every thread is in the middle of its search at once."""

    dtype, is_cuda = torch.float32, False

    @property
    def shape(self) -> torch.Size:
        time.sleep(0.002)
        return torch.Size([1, 1, 4, 2])


def test_a_bounce_buffer_has_one_user() -> None:
    buffers = BounceBuffers(most=2)
    for _ in range(3):
        buffers.give_back(torch.zeros(1, 1, 4, 2))
    with ThreadPoolExecutor(4) as executor:
        taken = list(executor.map(lambda _: buffers.take(SlowRows()), range(4)))
    assert len({id(buffer) for buffer in taken}) == 4
    buffers.give_back(taken[0])
    assert buffers.take(torch.zeros(1, 1, 8, 2)).shape == (1, 1, 8, 2)
    assert buffers.take(torch.zeros(1, 1, 4, 2)) is taken[0]


class Way:
    """A transfer: what it makes of copies to the host."""

    def __init__(self, how: str) -> None:
        self.how = how

    def write_back(self, *arguments: Any, after: object) -> HostTicket:
        if self.how == "refused":
            raise UsageError("the transfer is closed")
        ticket = HostTicket(0)
        if self.how == "failed":
            ticket.fail(OSError("the bus broke"))
        else:
            ticket.finish((0.0, 1.0))
        return ticket


@pytest.mark.parametrize("how", ["works", "unread", "refused", "failed", "no room"])
def test_bounce_buffers_come_back(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whatever goes wrong; only those that a failed copy may still write to are nobody's any more."""
    buffers, kept = BounceBuffers(), [torch.zeros(2, 3), torch.zeros(4)]
    for each in kept:
        buffers.give_back(each)
    rows = torch.ones(2, 3), torch.ones(4), torch.ones(1)
    take = buffers.take

    def limited(part: torch.Tensor) -> torch.Tensor:
        if part.numel() == 1:
            raise torch.OutOfMemoryError("no room")
        return take(part)

    if how == "no room":
        monkeypatch.setattr(buffers, "take", limited)
    errors = {"unread": ValueError, "refused": UsageError, "failed": OSError, "no room": RuntimeError}
    with pytest.raises(errors[how]) if how in errors else nullcontext():
        sent = Sent(buffers, rows, Way(how), None)  # type: ignore[arg-type]
        with sent.arrived() as host:
            assert [part.shape for part in host] == [part.shape for part in rows]
            if how == "unread":
                raise ValueError("nobody reads them")
    again = [take(part) for part in rows[:2]]
    assert all((a is b) == (how != "failed") for a, b in zip(again, kept, strict=True))

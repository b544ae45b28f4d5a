"""Prefill in chunks: hidden states that leave the device, rows that go to the host as they are made."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from herald.config import OffloadConfig
from herald.engine import hidden_states, prefill
from herald.engine.hidden_states import BUFFERS, HiddenStates
from herald.engine.program import StepProgram
from herald.errors import RequestAborted, RetrievalFailed
from herald.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.support import random_prompt, run, tokens

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def embed(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.unsqueeze(1).float() * torch.arange(1, 5, device=tokens.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "chunk"), [(12, 3), (13, 4), (40, 2), (7, 7), (6, 3), (0, 4)])
def test_every_layer_gets_what_the_last_one_left(
    device: str, count: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 0)
    ids = torch.arange(count, device=device)
    starts = list(range(0, count, chunk)) or [0]
    hidden = HiddenStates(embed, ids, 4, torch.float32, starts)
    for layer in range(5):
        for number, start in enumerate(starts):
            if start >= count:
                continue
            part = hidden.take(layer, number)
            if device == "cuda":
                torch.cuda._sleep(200_000)
            expected = embed(ids[start : start + chunk]) * 2**layer + (2**layer - 1)
            assert torch.equal(part, expected)
            part.mul_(2).add_(1)
            hidden.give_back(number)
    hidden.close()
    hidden.close()


def test_only_long_prompts_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(8)
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 8 * 4 * 4)
    kept = HiddenStates(embed, ids, 4, torch.float32, [0, 2, 4, 6])
    assert kept._slab is None
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 8 * 4 * 4 - 1)
    moved = HiddenStates(embed, ids, 4, torch.float32, [0, 2, 4, 6])
    assert moved._slab is not None
    assert moved._buffers.shape == (BUFFERS, 2, 4)
    slab = moved._slab
    del moved  # an aborted request drops its prefill half-way
    assert slab.closed


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["device", "host"])
def test_no_room_leaves_nothing_behind(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 0)

    def no_room(*arguments: object, **options: object) -> None:
        raise MemoryError("no room")

    holder = torch if what == "device" else hidden_states
    monkeypatch.setattr(holder, "empty" if what == "device" else "HostSlab", no_room)
    with pytest.raises(MemoryError, match="no room"):
        HiddenStates(embed, torch.arange(8), 4, torch.float32, [0, 2, 4, 6])
    gc.collect()


@pytest.mark.parametrize("budget", [1.0, 0.3])
def test_chunks_and_where_they_wait_change_nothing(
    make_engine: MakeEngine, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit a layer, or many with hidden states on the host: the same tokens, pool and index."""
    offload = OffloadConfig(kv_budget=budget, sink_rows=2, recent_rows=8, min_resident_rows=16)
    prompts = [random_prompt(n, n) for n in (1, 90, 300, 511)]
    found = []
    for chunk, kept in ((64, 0), (64, 1 << 30), (4096, 1 << 30)):
        monkeypatch.setattr(hidden_states, "KEPT_BYTES", kept)
        engine = make_engine("sdar_b8", offload, prefill_chunk=chunk)
        decoded = tokens(run(engine, prompts, PARAMS))
        store = engine.memory.store
        assert store is not None and engine.retriever is not None
        engine.retriever.drain()
        found.append((decoded, store.pool.rows.clone(), [array.copy() for array in store.index.arrays]))
    moved, stayed, whole = found
    assert moved[0] == stayed[0] == whole[0]
    assert torch.equal(moved[1].view(torch.int32), stayed[1].view(torch.int32))
    assert all(np.array_equal(a, b) for a, b in zip(moved[2], stayed[2], strict=True))
    # products of other shapes round otherwise
    torch.testing.assert_close(whole[1], stayed[1], equal_nan=True)
    assert np.mean(whole[2][0] != stayed[2][0]) < 0.01


@pytest.mark.parametrize("ends", ["error", "abort"])
def test_who_keeps_a_request_keeps_no_memory_of_its_prefill(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Who catches "no room" tries a shorter prompt, with the error still in hand."""
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 0)
    offload = OffloadConfig(kv_budget=0.3, sink_rows=2, recent_rows=8, min_resident_rows=16)
    engine = make_engine("sdar_b8", offload, prefill_chunk=64)
    held: list[weakref.ref[object]] = []
    attention = prefill.prefill_attention

    def limited(q: torch.Tensor, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        task = request.prefill
        assert task is not None and task._hidden._slab is not None and task._rows is not None
        held[:] = [weakref.ref(thing) for thing in (task._rows, task._hidden._slab, q)]
        if task.layer == 1 and task.chunk == 3:
            if ends == "error":
                raise torch.OutOfMemoryError("no room")
            engine.abort(request.request_id)
        return attention(q, rows, *others)

    monkeypatch.setattr(prefill, "prefill_attention", limited)
    request = engine.add_request(random_prompt(400, 1), PARAMS)
    while engine.has_work:
        engine.step()
    assert isinstance(request.error, RetrievalFailed if ends == "error" else RequestAborted)
    gc.collect()
    assert [thing() for thing in held] == [None, None, None]
    assert engine.memory.store is not None and engine.retriever is not None
    engine.retriever.drain()
    assert engine.memory.arena.idle


def test_an_error_in_the_first_commit_ends_its_request_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("sdar_b8", OffloadConfig(enabled=False))
    (expected,) = tokens(run(engine, [[1] * 90], PARAMS))
    take, calls = StepProgram.take_logits, 0

    def limited(program: StepProgram, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("no room")
        take(program, inputs, logits)

    monkeypatch.setattr(StepProgram, "take_logits", limited)
    first, second = (engine.add_request([1] * 90, PARAMS) for _ in range(2))
    while engine.has_work:
        engine.step()
    assert isinstance(first.error, RetrievalFailed) and "prefilled" in str(first.error)
    assert list(second.output_ids) == expected and engine.memory.arena.idle

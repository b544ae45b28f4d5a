"""Engines whose selections are scored on a "device" that is the host: same tokens, whatever happens to it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from herald import LLM, EngineConfig, OffloadConfig, SamplingParams
from herald.engine import memory
from herald.errors import ResidentSetTooSmall
from herald.kvstore import host_memory
from herald.kvstore.native import find_native
from herald.select import Selector, device_scan
from tests.engine.conftest import GOLDEN, MakeEngine
from tests.engine.support import random_prompt, run, tokens

pytestmark = pytest.mark.skipif(find_native().module is None, reason=find_native().reason)

ALONE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
HELD = [0, 30_000, 1 << 30]  # nothing, some layers, all


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[Selector]:
    """Every store's selector shares with the host's "device"; gives those that were made."""
    made: list[Selector] = []

    def make(*arguments: Any, device: Any, device_bytes: int) -> Selector:
        selector = Selector(*arguments, device=torch.device("cpu"), device_bytes=device_bytes)
        assert selector.device_scan is not None
        selector.device_scan._least = 0
        made.append(selector)
        return selector

    monkeypatch.setattr(memory, "Selector", make)
    monkeypatch.setattr(device_scan, "LAYERS_LEFT", 0)
    return made


def held(num_bytes: int) -> OffloadConfig:
    return replace(ALONE, index_device_bytes=num_bytes)


@pytest.mark.parametrize("num_bytes", HELD)
@pytest.mark.parametrize("bits", [8, 4])
def test_pools_that_grow_and_prompts_that_share(
    on_host: list[Selector], make_engine: MakeEngine, bits: Any, num_bytes: int
) -> None:
    batches = [[random_prompt(60, 1)], [random_prompt(300, 2), random_prompt(90, 3)], [random_prompt(700, 4)]]
    batches.append([random_prompt(300, 2) + random_prompt(40, 5), random_prompt(300, 2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Selector", Selector)
        alone = make_engine("sdar_b8", replace(ALONE, index_bits=bits))
        expected = [tokens(run(alone, batch, PARAMS)) for batch in batches]
    assert not on_host
    engine = make_engine("sdar_b8", replace(held(num_bytes), index_bits=bits))
    assert [tokens(run(engine, batch, PARAMS)) for batch in batches] == expected
    assert len(on_host) > 1
    for selector in on_host:
        scan = selector.device_scan
        assert scan is not None and not selector.device_reason and scan.layers > 0
        assert (scan.layers_held > 0) == (num_bytes > 0)
    last = on_host[-1].device_scan
    assert last is not None and last._memory is not None
    assert len(last._memory._by_width) == 1  # what was warmed up is what selections have


@pytest.mark.parametrize("num_bytes", HELD)
def test_documents_loaded_into_pages_that_the_device_has_seen(
    on_host: list[Selector], tmp_path: Path, num_bytes: int
) -> None:
    """A pool of few pages: the document takes those of the prompts before it."""
    document, question = random_prompt(600, 7), random_prompt(30, 8)

    def ask(llm: LLM, prompt: list[int]) -> tuple[int, ...]:
        return llm.generate(prompt_token_ids=[prompt], sampling_params=PARAMS)[0].token_ids

    path, config = GOLDEN / "sdar_b8", EngineConfig()
    with LLM(path, device="cpu", offload=ALONE, engine=config, seed=0) as llm:
        llm.save_prefix(document, tmp_path / "saved")
        expected = ask(llm, document + question)
        room = 12 * llm.engine.memory.layout.page_bytes
    offload = replace(held(num_bytes), host_memory_bytes=room)
    with LLM(path, device="cpu", offload=offload, engine=config, seed=0) as llm:
        for seed in range(3):
            ask(llm, random_prompt(640, 20 + seed))
        llm.load_prefix(tmp_path / "saved")
        assert ask(llm, document + question) == expected
        assert llm.prefix_stats.hit_tokens > 0


def test_an_engine_without_room_for_the_index_goes_on(
    on_host: list[Selector], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is told; what was made for it is given back; the next one may fit."""
    slabs: list[host_memory.HostSlab] = []
    make = host_memory.HostSlab.__init__

    def watched(slab: host_memory.HostSlab, *arguments: Any, **options: Any) -> None:
        slabs.append(slab)
        make(slab, *arguments, **options)

    monkeypatch.setattr(host_memory.HostSlab, "__init__", watched)
    engine = make_engine("sdar_b8", held(1 << 30))
    full = device_scan._DeviceMemory.on_device

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_scan._DeviceMemory, "on_device", refuse)
    for _ in range(2):
        before = threading.active_count()
        with pytest.raises(ResidentSetTooSmall, match="use less index_device_bytes"):
            run(engine, [random_prompt(100, 1)], PARAMS)
        assert threading.active_count() == before
        assert slabs and all(slab.closed for slab in slabs)
    monkeypatch.setattr(device_scan._DeviceMemory, "on_device", full)
    assert len(tokens(run(engine, [random_prompt(100, 1)], PARAMS))[0]) == 20


@pytest.mark.parametrize("broken", ["KeyIndex", "Selector", "make_transfer"])
def test_a_store_that_cannot_be_made_gives_its_memory_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    pools: list[Any] = []
    monkeypatch.setattr(memory, "HostPool", partial(_kept, pools, memory.HostPool))
    monkeypatch.setattr(memory, broken, lambda *_, **__: 1 // 0)
    engine = make_engine("sdar_b8", ALONE)
    with pytest.raises(ZeroDivisionError):
        engine.memory.ensure(0, 4)
    assert [pool.slab.closed for pool in pools] == [True]


def _kept(found: list[Any], make: Any, *arguments: Any) -> Any:
    found.append(make(*arguments))
    return found[-1]

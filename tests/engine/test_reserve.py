"""What is reserved serves as many requests as it was made for, whatever came and went before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.arena import DeviceArena
from herald.engine.factory import make_engine as engine_of
from herald.engine.request import Phase, Request
from herald.engine.reserve import reserve
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from tests.engine.conftest import DENSE, GOLDEN, MakeEngine
from tests.engine.support import leaks, random_prompt
from tests.support.golden import golden_model

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.mark.parametrize("seed", range(4))
def test_as_many_ranges_as_units(seed: int) -> None:
    """Ranges of up to a unit come and go; while fewer than there are units live, another one fits."""
    rng, unit, count = random.Random(seed), 37, 5
    arena = DeviceArena(1, 1, 2, count * unit + rng.randrange(unit), torch.float32, torch.device("cpu"))
    arena.unit = unit
    live: list[tuple[int, int]] = []
    for _ in range(2000):
        if len(live) < count and rng.random() < 0.6:
            rows = rng.choice((rng.randrange(1, unit + 1), unit))
            start = arena.allocate(rows)
            assert start is not None
            assert all(start + rows <= a or a + n <= start for a, n in live)
            live.append((start, rows))
        elif live:
            arena.release(*live.pop(rng.randrange(len(live))))
    for each in live:
        arena.release(*each)
    assert arena.idle and arena.allocate(2 * unit + 3) is not None, "larger ones lie anywhere"


@pytest.mark.parametrize(
    "options",
    [{}, {"refresh_commits": 0.0}, {"refresh_step": 1, "refresh_lag": 1}, {"on_late": "proceed"},
     {"difference_only": False, "refresh_commits": 0.0}, {"kv_budget": 1.0}, {"kv_budget": 0.5}],
)  # fmt: skip
def test_no_request_needs_more_than_the_reserve_holds_for_one(
    make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    engine = make_engine("sdar_b8", replace(SPARSE, **options), max_num_seqs=3, max_model_len=1024)
    reserve(engine, 3 * 1024)
    assert engine.memory.store is not None
    rows, pages = engine.memory.arena.capacity // 3, engine.memory.store.pool.num_pages // 3
    rng = random.Random(1)
    for _ in range(60):
        length = rng.randrange(1, 1000)
        params = SamplingParams(
            max_tokens=rng.choice((1, rng.randrange(1, 1017 - length), 1016 - length)),
            block_length=rng.choice((0, 1, 2, 4, 8)),
        )
        request = engine.new_request([1] * length, params)
        assert request.required_rows(request.offload) <= rows == engine.memory.arena.unit
        assert engine.memory.pages_for(request.stored_positions) <= pages


@pytest.mark.parametrize("offload", [DENSE, SPARSE, replace(SPARSE, refresh_commits=0.0)])
def test_no_seat_stays_empty_while_somebody_waits(make_engine: MakeEngine, offload: OffloadConfig) -> None:
    """Long and short requests come and go: the queue moves in order, and a seat that is free is taken."""
    seats, limit = 4, 512
    limits = {"max_num_seqs": seats, "max_model_len": limit, "tokens_per_step": 64, "prefill_chunk": 64}
    engine = make_engine("sdar_b8", offload, **limits)
    reserve(engine, seats * limit)
    rng, documents = random.Random(3), [random_prompt(300, n) for n in range(3)]
    live: list[Request] = []
    came: list[Request] = []
    ended = shared = 0
    for step in range(700):
        while len(live) < 7 and step < 500:
            document = rng.choice(documents)[: rng.choice((8, 100, 300))]
            prompt = document + random_prompt(rng.randrange(1, 60), step)
            most = limit - len(prompt) - 8
            params = SamplingParams(
                max_tokens=rng.choice((most, rng.randrange(1, 40))), ignore_eos=True, block_length=8
            )
            live.append(engine.add_request(prompt, params))
            came.append(live[-1])
        if rng.random() < 0.08:
            engine.abort(rng.choice(live).request_id) if live else None
        engine.step()
        scheduler = engine.scheduler
        if scheduler.waiting and len(scheduler.running) < seats:
            # What ended a moment ago may be on its way back.
            if engine.retriever is not None:
                engine.retriever.drain()
            engine._admit()
            assert not scheduler.waiting or len(scheduler.running) == seats
        waiting = [came.index(request) for request in scheduler.waiting]
        assert waiting == sorted(waiting)
        for request in [each for each in live if each.phase is Phase.FINISHED]:
            live.remove(request)
            ended += 1
            shared += request.counters.cached_tokens > 0
    for request in live:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    assert ended > 30 and (shared > 3 or not offload.enabled)
    assert not leaks(engine)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_family_can_reserve(folder: str) -> None:
    """A request that runs leaves room for as many beside it as were asked for."""
    offload = DENSE if folder == "diffusion_gemma" else SPARSE
    model = golden_model(folder, "cpu", torch.float32)
    engine = engine_of(
        model, Tokenizer(GOLDEN / folder), offload, EngineConfig(max_num_seqs=3, max_model_len=256), seed=0
    )
    reserve(engine, 3 * 256)
    cache = "dual" if model.config.full_attention else "auto"
    params = SamplingParams(max_tokens=8, ignore_eos=True, cache=cache)
    engine.add_request([1] * 20, params)
    engine.step()
    for token in (2, 3):
        engine.add_request([token] * 20, params)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3
    engine.close()

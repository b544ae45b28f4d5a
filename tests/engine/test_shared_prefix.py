"""Requests that begin alike share pages: the same tokens, rows and codes, nothing lost or read too early."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from herald.config import OffloadConfig
from herald.engine import layer_rows, memory
from herald.engine.engine import Engine
from herald.engine.request import Phase, Request
from herald.errors import HostPoolTooSmall
from herald.kvstore import PageAllocator
from herald.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.support import check_resident_rows, leaks, random_prompt, run, tokens

SMALL: dict[str, Any] = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
SPARSE = OffloadConfig(kv_budget=0.2, **SMALL)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
CHUNK = 512  # pieces of 128 in the last chunk, pages of 64


def engine_of(make_engine: MakeEngine, folder: str, offload: OffloadConfig, sharing: bool = True) -> Engine:
    mask = None if folder.startswith("sdar_b") else 319
    offload = replace(offload, prefix_sharing=sharing)
    return make_engine(folder, offload, mask_token_id=mask, prefill_chunk=CHUNK)


def alone(make_engine: MakeEngine, prompt: list[int], folder: str = "sdar_b8") -> list[int]:
    """Tokens of a prompt on an engine that shares nothing."""
    engine = engine_of(make_engine, folder, SPARSE, sharing=False)
    return tokens(run(engine, [prompt], PARAMS))[0]


def prefilled(engine: Engine, prompt: list[int]) -> tuple[Request, list[np.ndarray]]:
    """A finished request, and what pool and index held of its prompt when its prefill was over."""
    found: list[np.ndarray] = []

    def look(live: list[Request]) -> None:
        store, size = engine.memory.store, engine.memory.layout.page_size
        if found or not live or live[0].phase is not Phase.DECODE:
            return
        assert engine.retriever is not None and store is not None and live[0].pages is not None
        engine.retriever.drain()
        pages = live[0].pages[: live[0].first_prefix // size]
        rows = store.pool.rows[:, pages.tolist()].view(torch.int32).numpy()
        found.extend([rows.copy(), *(a[:, pages].copy() for a in store.index.arrays if a.size)])

    (request,) = run(engine, [prompt], PARAMS, look)
    assert found
    return request, found


@pytest.mark.parametrize(
    ("folder", "budget", "bits"),
    [
        ("sdar_b8", 0.2, 8),
        ("sdar_b4", 0.1, 4),
        ("sdar_b8", 1.0, 16),
        ("sdar_moe", 0.2, 8),
        ("fast_dllm_v2_bd8_tied", 0.2, 8),
    ],
)
def test_the_same_bits_as_alone(make_engine: MakeEngine, folder: str, budget: float, bits: Any) -> None:
    """Later questions about a document skip its prefill; tokens, rows and codes are the same."""
    offload = OffloadConfig(kv_budget=budget, index_bits=bits, **SMALL)
    shares = engine_of(make_engine, folder, offload)
    rng = random.Random(budget)
    for length in (rng.randrange(600, 900), 1024, rng.randrange(130, 500)):
        document = random_prompt(length, length)
        for question in range(3):
            prompt = document + random_prompt(rng.randrange(5, 90), question)
            request, found = prefilled(shares, prompt)
            fresh = engine_of(make_engine, folder, offload, sharing=False)
            expected, bare = prefilled(fresh, prompt)
            assert request.output_ids == expected.output_ids
            assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, bare, strict=True))
            cached = request.counters.cached_tokens
            assert cached % 64 == 0 and expected.counters.cached_tokens == 0
            # Pieces of 128 are shared, and in another chunk than the last question's all of it.
            same_chunk = len(prompt) // CHUNK == length // CHUNK
            assert (
                cached == 0
                if question == 0
                else cached >= length // (128 if same_chunk else CHUNK) * 128 - 384
            )
            fresh.close()
    stats = shares.prefixes.stats
    assert stats.lookups == 9 and stats.hits == 6 and stats.hit_tokens > 2000
    assert not leaks(shares)


@pytest.mark.parametrize(
    ("folder", "cached"),
    [("sdar_b8", {64: 64, 640: 640, 512: 512}), ("fast_dllm_v2_bd8_tied", {64: 0, 640: 512, 512: 0})],
)
def test_a_prompt_that_is_shared_as_a_whole(
    make_engine: MakeEngine, folder: str, cached: dict[int, int]
) -> None:
    """Nothing is left to prefill but the first block's lane, and the row that predicts its first token."""
    engine = engine_of(make_engine, folder, SPARSE)
    for length in cached:
        prompt = random_prompt(length, length)
        first, second = (run(engine, [prompt], PARAMS)[0] for _ in range(2))
        assert second.counters.cached_tokens == cached[length]
        assert first.output_ids == second.output_ids == alone(make_engine, prompt, folder)


@pytest.mark.parametrize("pool_pages", [0, 30])
def test_questions_that_arrive_together(make_engine: MakeEngine, pool_pages: int) -> None:
    """Those behind the first find its pages when their own prefill begins, also where not all fit at once."""
    engine = make_engine()  # for its layout
    offload = replace(SPARSE, host_memory_bytes=pool_pages * engine.memory.layout.page_bytes)
    engine = make_engine(offload=offload, prefill_chunk=CHUNK, max_num_seqs=4, tokens_per_step=16)
    document = random_prompt(1100, 1)
    prompts = [document + random_prompt(n, n) for n in (30, 41, 7, 60, 19)]
    requests = run(engine, prompts, PARAMS, lambda live: check_resident_rows(engine, live) and None)
    assert tokens(requests) == [alone(make_engine, prompt) for prompt in prompts]
    assert [r.counters.cached_tokens >= 1024 for r in requests] == [False, True, True, True, True]
    assert not leaks(engine)


def nan_when_taken(monkeypatch: pytest.MonkeyPatch, engine: Callable[[], Engine]) -> None:
    """Pages hold NaN from when they are taken until somebody writes them."""
    allocate = PageAllocator.allocate

    def poisoned(self: PageAllocator, count: int) -> np.ndarray:
        pages = allocate(self, count)
        store = engine().memory.store
        if store is not None and store.pool.allocator is self:
            store.pool.rows[:, pages.tolist()] = float("nan")
        return pages

    monkeypatch.setattr(PageAllocator, "allocate", poisoned)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whoever is aborted whenever, the others' tokens are right, no page leaks, none is read too early."""
    rng = random.Random(seed)
    documents = [random_prompt(n, n) for n in (700, 450)]
    prompts = [d + random_prompt(n, n) for d in documents for n in (9, 33, 70)]
    expected = {id(prompt): alone(make_engine, prompt) for prompt in prompts}
    offload = replace(SPARSE, host_memory_bytes=24 * make_engine().memory.layout.page_bytes)
    engine = make_engine(offload=offload, prefill_chunk=CHUNK, max_num_seqs=3, tokens_per_step=16)
    nan_when_taken(monkeypatch, lambda: engine)
    done = 0
    live: list[tuple[Request, list[int]]] = []
    for _ in range(260):
        if len(live) < 4 and rng.random() < 0.2:
            prompt = rng.choice(prompts)
            live.append((engine.add_request(prompt, PARAMS), prompt))
        if live and rng.random() < 0.06:
            engine.abort(rng.choice(live)[0].request_id)
        engine.step()
        for request, prompt in [pair for pair in live if pair[0].phase is Phase.FINISHED]:
            live.remove((request, prompt))
            if request.finish_reason == "length":
                assert request.output_ids == expected[id(prompt)]
                done += 1
    for request, _ in live:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    assert not leaks(engine)
    stats = engine.prefixes.stats
    assert done > 4 and stats.hits > 2 and stats.evicted_pages > 0
    assert stats.cached_pages == len(engine.memory.prefixes) > 0


@pytest.mark.parametrize("when", range(0, 14, 3))
def test_an_abort_in_the_first_prefill_leaves_the_second(make_engine: MakeEngine, when: int) -> None:
    engine = make_engine(offload=SPARSE, prefill_chunk=128, tokens_per_step=16)
    document = random_prompt(500, 3)
    keeper = engine.add_request(random_prompt(20, 9), replace(PARAMS, max_tokens=300))
    while keeper.phase is not Phase.DECODE:
        engine.step()
    first, second = (engine.add_request(document + random_prompt(n, n), PARAMS) for n in (10, 20))
    for _ in range(when):
        engine.step()
    engine.abort(first.request_id)
    while second.phase is not Phase.FINISHED:
        engine.step()
    engine.abort(keeper.request_id)
    while engine.has_work:
        engine.step()
    fresh = make_engine(offload=replace(SPARSE, prefix_sharing=False), prefill_chunk=128)
    assert second.output_ids == tokens(run(fresh, [second.prompt_ids], PARAMS))[0]
    assert not leaks(engine)


def test_a_follow_up_shares_the_answer(make_engine: MakeEngine) -> None:
    """With every row resident the pages of an answer are what a prefill would make, but for rounding."""
    offload = OffloadConfig(kv_budget=1.0, difference_only=False, **SMALL)
    engine = make_engine(offload=offload, prefill_chunk=CHUNK)
    long = replace(PARAMS, max_tokens=150)
    prompt = random_prompt(333, 1)
    (first,) = run(engine, [prompt], long)
    follow_up = [*prompt, *first.output_ids, *random_prompt(40, 2)]
    (second,) = run(engine, [follow_up], long)
    # The last block's KV was never made.
    assert second.counters.cached_tokens == (333 + 150 - 8) // 64 * 64
    fresh = make_engine(offload=replace(offload, prefix_sharing=False), prefill_chunk=CHUNK)
    _, found = prefilled(fresh, follow_up)
    assert second.output_ids == tokens(run(fresh, [follow_up], long))[0]
    assert engine.retriever is not None and engine.memory.store is not None
    # Codes of the answer's pages are those of whole pages.
    store, names = engine.memory.store, engine.prefixes.names(follow_up, 8)
    nodes = engine.memory.prefixes.match(names.tokens, names.exact, names.ends)
    pages = [node.page for node in nodes]
    torch.testing.assert_close(
        store.pool.rows[:, pages].view(torch.int32).view(torch.float32),
        torch.from_numpy(found[0]).view(torch.float32)[:, : len(pages)],
        rtol=1e-4,
        atol=1e-5,
    )
    before = [array[:, pages].copy() for array in store.index.arrays]
    store.index.append_span(np.array(pages, dtype=np.int32), 0, len(pages) * 64)
    assert all(np.array_equal(array[:, pages], old) for array, old in zip(store.index.arrays, before))
    assert not leaks(engine)


def test_an_answer_of_a_smaller_budget_is_not_shared(make_engine: MakeEngine) -> None:
    """Its rows are what few rows made of them: a request with the engine's budget must not get those."""
    engine = engine_of(make_engine, "sdar_b8", OffloadConfig(kv_budget=1.0, **SMALL))
    prompt = random_prompt(520, 1)
    few = SamplingParams(
        max_tokens=200, ignore_eos=True, confidence_threshold=None, denoising_steps=4, kv_budget=0.05
    )
    (first,) = run(engine, [prompt], few)
    more = [*prompt, *first.output_ids, *random_prompt(20, 2)]
    whole = replace(few, kv_budget=None)
    (second,) = run(engine, [more], whole)
    assert 0 < second.counters.cached_tokens <= len(prompt)
    assert list(second.output_ids) == tokens(run(make_engine("sdar_b8"), [more], whole))[0]


def test_an_answer_is_not_for_those_who_ask_for_more_rows(make_engine: MakeEngine) -> None:
    """A request whose budget is above the engine's gets rows that its own makes, or a prefill."""
    engine = engine_of(make_engine, "sdar_b8", OffloadConfig(kv_budget=0.05, **SMALL))
    few = replace(PARAMS, max_tokens=200)
    all_rows = replace(few, kv_budget=1.0)
    prompt = random_prompt(520, 1)
    (first,) = run(engine, [prompt], few)
    more = [*prompt, *first.output_ids, *random_prompt(20, 2)]
    (rich,) = run(engine, [more], all_rows)
    assert 0 < rich.counters.cached_tokens <= len(prompt)
    dense = make_engine("sdar_b8", prefill_chunk=CHUNK)
    assert rich.output_ids == tokens(run(dense, [more], few))[0]
    (poor,) = run(engine, [more], few)
    assert poor.counters.cached_tokens > len(prompt)
    # What follows an answer in a prompt is made of it.
    again = [*more, *poor.output_ids, *random_prompt(90, 3)]
    (poor,) = run(engine, [again], few)
    assert poor.counters.cached_tokens > len(more)
    (rich,) = run(engine, [again], all_rows)
    assert rich.counters.cached_tokens <= len(more)
    assert rich.output_ids == tokens(run(dense, [again], few))[0]
    assert not leaks(engine)


def test_an_answer_of_an_aborted_request_is_shared(make_engine: MakeEngine) -> None:
    engine = make_engine(offload=SPARSE)
    prompt = random_prompt(100, 1)
    request = engine.add_request(prompt, replace(PARAMS, max_tokens=2000))
    while len(request.output_ids) < 200:
        engine.step()
    engine.abort(request.request_id)
    engine.step()
    (second,) = run(engine, [[*prompt, *request.output_ids, 1, 2, 3]], PARAMS)
    assert second.counters.cached_tokens >= 256
    assert not leaks(engine)


def test_block_lengths_do_not_mix(make_engine: MakeEngine) -> None:
    engine = make_engine(offload=SPARSE, prefill_chunk=CHUNK)
    prompt = random_prompt(300, 1)
    run(engine, [prompt], PARAMS)
    (other,) = run(engine, [prompt], replace(PARAMS, block_length=16))
    assert other.counters.cached_tokens == 0
    (same,) = run(engine, [prompt], replace(PARAMS, block_length=16))
    assert same.counters.cached_tokens > 0 and same.output_ids == other.output_ids


def test_off_is_off(make_engine: MakeEngine) -> None:
    engine = make_engine(offload=replace(SPARSE, prefix_sharing=False))
    for _ in range(2):
        (request,) = run(engine, [random_prompt(300, 1)], PARAMS)
        assert request.counters.cached_tokens == 0
    assert engine.prefixes.stats.lookups == 0 and not len(engine.memory.prefixes) and not leaks(engine)
    # A family whose positions see later ones has no finished prefix.
    engine.model.config = replace(engine.model.config, full_attention=True)
    assert not memory.EngineMemory(engine.model, SPARSE).shares_prefixes


def test_a_pool_that_grows_takes_its_pages_along(make_engine: MakeEngine) -> None:
    engine = make_engine(offload=SPARSE, prefill_chunk=CHUNK)
    document = random_prompt(640, 1)
    run(engine, [document], PARAMS)
    pages = engine.memory.store.pool.num_pages
    (request,) = run(engine, [document + random_prompt(300, 2)], PARAMS)
    assert request.counters.cached_tokens == 640
    assert engine.memory.store.pool.num_pages > pages
    assert request.output_ids == alone(make_engine, request.prompt_ids)
    assert not leaks(engine)


def test_a_pool_that_cannot_grow_beside_its_pages_drops_them(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(offload=SPARSE)
    run(engine, [random_prompt(300, 1)], PARAMS)
    make = memory.EngineMemory._new_store

    def limited(self: memory.EngineMemory, pages: int) -> memory.HostStore:
        if self.store is not None:
            raise HostPoolTooSmall("no room for two pools")
        return make(self, pages)

    monkeypatch.setattr(memory.EngineMemory, "_new_store", limited)
    prompt = random_prompt(900, 2)
    (request,) = run(engine, [prompt], PARAMS)
    assert request.output_ids == alone(make_engine, prompt)
    assert not leaks(engine)


def test_one_buffer_is_enough(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without room for a second layer's KV brings each layer's prefix when its turn comes."""
    engine = make_engine(offload=SPARSE, prefill_chunk=CHUNK)
    document = random_prompt(640, 1)
    run(engine, [document], PARAMS)
    empty, whole = torch.empty, []
    buffers: list[int] = []
    begin = layer_rows.LayerRows.begin

    def tight(shape: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if isinstance(shape, tuple) and shape[1:2] == (688,):
            whole.append(shape)
            if len(whole) == 2:
                raise torch.OutOfMemoryError("no room")
        return empty(shape, *arguments, **options)

    def watched(self: layer_rows.LayerRows, layer: int) -> torch.Tensor:
        buffers.append(len(self._buffers))
        return begin(self, layer)

    monkeypatch.setattr(torch, "empty", tight)
    monkeypatch.setattr(layer_rows.LayerRows, "begin", watched)
    prompt = document + random_prompt(50, 2)
    (request,) = run(engine, [prompt], PARAMS)
    assert set(buffers) == {1} and request.counters.cached_tokens == 640
    assert request.output_ids == alone(make_engine, prompt)


def test_a_damaged_copy_ends_its_request_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(offload=SPARSE, prefill_chunk=CHUNK)
    document = random_prompt(640, 1)
    run(engine, [document], PARAMS)
    store = engine.memory.store
    assert store is not None

    def broken() -> None:
        raise OSError("the bus broke")

    store.transfer.delay = broken
    first = engine.add_request([*document, 1], PARAMS)
    while engine.has_work:
        engine.step()
    assert first.error is not None and "the bus broke" in str(first.error)
    store.transfer.delay = None
    assert not leaks(engine)
    (second,) = run(engine, [[*document, 1]], PARAMS)
    assert second.output_ids == alone(make_engine, second.prompt_ids)


def test_pages_are_shared_once_they_are_indexed(make_engine: MakeEngine) -> None:
    """A second request that stores nothing of its own selects by codes that were made for the first."""
    prompt = random_prompt(640, 1)
    expected = alone(make_engine, prompt)
    engine = make_engine(offload=SPARSE, prefill_chunk=CHUNK)

    def slow_down(retriever: Any, store: memory.HostStore) -> None:
        append = store.index.append_span

        def slowly(*arguments: Any, **options: Any) -> None:
            time.sleep(0.05)
            append(*arguments, **options)

        store.index.append_span = slowly  # type: ignore[method-assign]
        for array in store.index.arrays:
            array.view(np.uint8)[:] = 255

    engine.on_retriever = slow_down
    # The first one's only block needs no selection, behind which the second one's would wait.
    requests = run(engine, [prompt, prompt], [replace(PARAMS, max_tokens=8), PARAMS])
    assert requests[1].counters.cached_tokens == 640
    assert tokens(requests) == [expected[:8], expected]

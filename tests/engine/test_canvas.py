"""Engines of families with full attention: long prompts, offload, batches, ends, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from herald.config import OffloadConfig
from herald.engine import hidden_states
from herald.engine.canvas import CanvasEngine, full_forward
from herald.engine.request import Phase
from herald.errors import HostPoolTooSmall, InvalidOption, NonFiniteLogits, PromptTooLong
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeCanvas
from tests.engine.support import check_resident_rows, random_prompt, run, tokens
from tests.support.golden import FULL_FOLDERS, full_model
from tests.support.reference_canvas import decode_dream, decode_llada

SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
SPARSE = OffloadConfig(kv_budget=0.2, **SMALL)
REFRESHED = OffloadConfig(kv_budget=0.2, refresh_step=2, refresh_lag=1, verify_transfers=True, **SMALL)
LLADA = SamplingParams(max_tokens=16, block_length=8)
DUAL = replace(LLADA, cache="dual")
CACHED = [DUAL, replace(LLADA, cache="prefix"), replace(DUAL, confidence_threshold=0.5)]


def leaks(engine: CanvasEngine) -> str:
    """What a request left behind."""
    if engine.retriever is not None:
        engine.retriever.drain()
    store = engine.memory.store
    if store is not None and store.pool.allocator.num_free != store.pool.allocator.num_pages:
        return "pages"
    return "" if engine.memory.arena.idle and not engine.has_work else "rows or requests"


@pytest.mark.parametrize("folder", ["llada", "llada_moe"])
@pytest.mark.parametrize("threshold", [None, 0.6])
def test_long_prompts_as_a_plain_loop_decodes_them(
    make_canvas: MakeCanvas, folder: str, threshold: float | None
) -> None:
    prompts = [random_prompt(length, length) for length in (1, 63, 64, 65, 200)]
    params = replace(LLADA, confidence_threshold=threshold)
    engine = make_canvas(folder, prefill_chunk=64)
    expected = [decode_llada(engine.model, prompt, 16, 8, threshold) for prompt in prompts]
    assert tokens(run(engine, prompts, params)) == expected


def test_dream_on_long_prompts_as_a_plain_loop_decodes_them(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("dream", prefill_chunk=64)
    prompts = [random_prompt(length, length) for length in (1, 64, 150)]
    expected = [decode_dream(engine.model, prompt, 13) for prompt in prompts]
    assert tokens(run(engine, prompts, SamplingParams(max_tokens=13))) == expected


@pytest.mark.parametrize(("folder", "offload"), [("llada", SPARSE), ("llada_moe", DENSE), ("dream", SPARSE)])
def test_neither_chunks_nor_streaming_change_a_token(
    make_canvas: MakeCanvas, folder: str, offload: OffloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states that wait in host memory and queries that are computed twice are what they were."""
    prompts = [random_prompt(length, length) for length in (90, 331)]
    expected = [tokens(run(make_canvas(folder, offload), prompts, params)) for params in CACHED]
    chunked = [
        tokens(run(make_canvas(folder, offload, prefill_chunk=64), prompts, params)) for params in CACHED
    ]
    assert chunked == expected
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 0)
    monkeypatch.setattr(full_forward, "KEPT_BYTES", 0)
    streamed = [
        tokens(run(make_canvas(folder, offload, prefill_chunk=64), prompts, params)) for params in CACHED
    ]
    assert streamed == expected


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_budget_one_is_the_engine_without_offload(make_canvas: MakeCanvas, folder: str) -> None:
    lengths = [1, 2, 7, 63, 64, 65, 127, 128, 250]
    prompts = [random_prompt(length, length) for length in lengths]
    params = [replace(CACHED[i % 3], max_tokens=5 + 7 * (i % 4)) for i in range(len(prompts))]
    expected = tokens(run(make_canvas(folder), prompts, params))
    whole = OffloadConfig(kv_budget=1.0)
    assert tokens(run(make_canvas(folder, whole), prompts, params)) == expected
    travelled = replace(whole, refresh_step=1, difference_only=False, verify_transfers=True)
    engine = make_canvas(folder, travelled)
    requests = run(engine, prompts, params)
    assert tokens(requests) == expected
    assert any(request.counters.rows_moved > 0 for request in requests)
    assert not leaks(engine)


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_a_small_budget_keeps_few_rows(make_canvas: MakeCanvas, folder: str) -> None:
    prompt = random_prompt(400, 4)
    dense, sparse = make_canvas(folder), make_canvas(folder, SPARSE)
    (whole,) = run(dense, [prompt], DUAL)
    (few,) = run(sparse, [prompt], DUAL)
    rows = 80 + 8  # a fifth of the prompt, the canvas outside the block
    config = sparse.model.config
    assert few.counters.resident_bytes == rows * config.num_layers * config.num_kv_heads * 2 * 16 * 4
    assert few.counters.rows_selected == 2 * 80 * config.num_layers * config.num_kv_heads
    assert whole.counters.rows_selected == 0
    assert few.counters.host_kv_bytes == few.counters.rows_moved == 0
    assert len(few.output_ids) == 16
    assert not leaks(sparse)


def test_chosen_rows_are_better_than_others(make_canvas: MakeCanvas) -> None:
    """Steps that see the rows the block asked for stay nearer to the whole prompt's than with any others."""
    prompts = [random_prompt(300, seed) for seed in range(12)]
    expected = tokens(run(make_canvas("llada"), prompts, DUAL))

    def agreement(turn: bool) -> int:
        engine = make_canvas("llada", SPARSE)
        if turn:
            scores = engine.first_scores
            engine.first_scores = lambda *given: -scores(*given)
        found = tokens(run(engine, prompts, DUAL))
        return sum(a == b for one, two in zip(found, expected) for a, b in zip(one, two))

    assert agreement(turn=False) > agreement(turn=True) + 10


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_a_refresh_brings_rows_from_the_host(make_canvas: MakeCanvas, folder: str, cache: str) -> None:
    engine = make_canvas(folder, REFRESHED, prefill_chunk=64)
    compared = 0

    def compare(requests: list) -> None:
        nonlocal compared
        quiet = [request for request in requests if request.full is None and request.selection is None]
        compared += check_resident_rows(engine, quiet)

    prompts = [random_prompt(length, length) for length in (150, 331)]
    params = replace(LLADA, cache=cache)  # type: ignore[arg-type]
    requests = run(engine, prompts, params, compare)
    assert compared > 0
    for request in requests:
        assert request.counters.rows_moved > 0 and request.counters.host_kv_bytes > 0
        assert request.counters.selection_seconds > 0 and len(request.output_ids) == 16
    alone = [tokens(run(engine, [prompt], params))[0] for prompt in prompts]
    assert tokens(requests) == alone
    assert not leaks(engine)


@pytest.mark.parametrize("folder", FULL_FOLDERS)
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_prompts_stay_and_no_mask_is_left(make_canvas: MakeCanvas, folder: str, cache: str) -> None:
    engine = make_canvas(folder, SPARSE)
    mask = engine.model.config.mask_token_id
    prompts = [[mask], [5, mask, 7], [mask] * 40, [*random_prompt(100, 3), mask, mask]]
    params = replace(LLADA, cache=cache, max_tokens=13)  # type: ignore[arg-type]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    before = [list(prompt) for prompt in prompts]
    while engine.has_work:
        engine.step()
        for request, prompt in zip(requests, before, strict=True):
            if request.tokens is not None:  # type: ignore[attr-defined]
                assert request.tokens[: len(prompt)].tolist() == prompt  # type: ignore[attr-defined]
    for request in requests:
        assert request.error is None and len(request.output_ids) == 13 and mask not in request.output_ids


def test_the_mask_token_is_not_decoded_even_where_it_is_likeliest(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada")
    head = engine.model.head  # type: ignore[attr-defined]
    logits = engine.model.logits
    mask = engine.model.config.mask_token_id
    engine.model.logits = lambda hidden: logits(hidden).index_fill(  # type: ignore[method-assign]
        1, torch.tensor([mask]), 1e3
    )
    (request,) = run(engine, [random_prompt(20, 1)], LLADA)
    assert head.shape[0] > mask and len(request.output_ids) == 16 and mask not in request.output_ids


@pytest.mark.parametrize("offload", [SPARSE, REFRESHED], ids=["sparse", "refreshed"])
@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_a_request_decodes_the_same_in_any_batch(
    make_canvas: MakeCanvas, folder: str, offload: OffloadConfig
) -> None:
    caches = ["none", "prefix", "dual"]
    params = [
        replace(
            LLADA,
            cache=caches[i % len(caches)],  # type: ignore[arg-type]
            temperature=0.8 * (i % 2),
            top_k=20,
            seed=i,
            max_tokens=8 + 3 * i,
        )
        for i in range(6)
    ]
    prompts = [random_prompt(30 + 41 * i, i) for i in range(6)]
    engine = make_canvas(folder, offload, tokens_per_step=64, max_num_seqs=4)
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(engine, prompts, params)) == alone
    assert not leaks(engine)


def test_one_full_forward_at_a_time_holds_a_layers_rows(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada", SPARSE, max_num_seqs=4, prefill_chunk=64, tokens_per_step=16)
    requests = [engine.add_request(random_prompt(200 + 9 * n, n), DUAL) for n in range(4)]
    most = 0
    while engine.has_work:
        engine.step()
        begun = [r for r in requests if r.full is not None and r.full.begun]  # type: ignore[attr-defined]
        most = max(most, len(begun))
    assert most == 1 and all(len(request.output_ids) == 16 for request in requests)


def test_seeds_draw_different_tokens(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("dream")
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 2, 1)]
    first, second, again = tokens(run(engine, [random_prompt(20, 1)] * 3, params))
    assert first == again != second


@pytest.mark.parametrize("folder", ["llada", "dream"])
@pytest.mark.parametrize("offload", [DENSE, REFRESHED], ids=["dense", "refreshed"])
def test_aborts_leave_nothing_behind(make_canvas: MakeCanvas, folder: str, offload: OffloadConfig) -> None:
    engine = make_canvas(folder, offload, prefill_chunk=64, tokens_per_step=16, max_num_seqs=3)
    expected = tokens(run(engine, [random_prompt(40, 1)], DUAL))
    for steps in range(0, 40, 6):
        keeper = engine.add_request(random_prompt(40, 1), DUAL)
        dropped = [engine.add_request(random_prompt(n, n), DUAL) for n in (200, 90, 30)]
        for _ in range(steps):
            engine.step()
        for request in dropped:
            engine.abort(request.request_id)
        while engine.has_work:
            engine.step()
        assert all(request.phase is Phase.FINISHED for request in dropped)
        assert [keeper.output_ids] == expected
        assert not leaks(engine), steps


def test_an_end_token_ends_the_request_with_its_block(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada")
    (whole,) = run(engine, [random_prompt(20, 1)], LLADA)
    eos = whole.output_ids[3]
    first = whole.output_ids.index(eos)
    engine.model.config = replace(engine.model.config, eos_token_ids=(eos,))
    (request,) = run(engine, [random_prompt(20, 1)], LLADA)
    assert request.output_ids == whole.output_ids[: first + 1] and request.finish_reason == "stop"
    assert request.counters.blocks == 1 and request.counters.steps == 8
    (kept,) = run(engine, [random_prompt(20, 1)], replace(LLADA, ignore_eos=True))
    assert kept.output_ids == whole.output_ids and kept.finish_reason == "length"


def test_logits_that_are_not_finite_end_their_request(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada_moe")
    logits = engine.model.logits
    engine.model.logits = lambda hidden: logits(hidden) * float("nan")  # type: ignore[method-assign]
    for params in (LLADA, DUAL):
        with pytest.raises(NonFiniteLogits):
            run(engine, [[1, 2, 3]], params)
    assert not leaks(engine)


def test_an_error_in_a_unit_ends_its_request_alone(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("dream", SPARSE, max_num_seqs=2)
    expected = tokens(run(engine, [random_prompt(50, 1)], DUAL))
    scores, calls = engine.first_scores, [0]

    def broken(*given: object) -> torch.Tensor:
        calls[0] += 1
        if given[2].shape[1] > 100:  # type: ignore[attr-defined]
            raise RuntimeError("no room")
        return scores(*given)  # type: ignore[arg-type]

    engine.first_scores = broken
    bad = engine.add_request(random_prompt(200, 2), DUAL)
    good = engine.add_request(random_prompt(50, 1), DUAL)
    while engine.has_work:
        engine.step()
    assert "no room" in str(bad.error) and calls[0] > 1
    assert [good.output_ids] == expected and not leaks(engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lookahead", "late"), ("lookahead_step", 2), ("lookahead_context", "block"), ("on_late", "proceed")],
)
def test_options_of_a_look_ahead_are_refused(make_canvas: MakeCanvas, field: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=f"{field}={value!r}.*full attention"):
        make_canvas("llada", OffloadConfig(**{field: value}))


def test_refusals_name_a_value_that_works(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada", replace(REFRESHED, host_memory_bytes=1 << 20), max_model_len=2048)
    with pytest.raises(PromptTooLong, match="at most 2,032 prompt tokens"):
        engine.add_request([1] * 2040, replace(LLADA, max_tokens=10))
    engine.add_request([1] * 2032, replace(LLADA, max_tokens=10))
    with pytest.raises(InvalidOption, match="algorithm='entropy'"):
        engine.add_request([1], replace(LLADA, algorithm="entropy"))
    with pytest.raises(InvalidOption, match="vocabulary"):
        engine.add_request([1, 9999], LLADA)
    with pytest.raises(HostPoolTooSmall, match="use at most"):
        engine.add_request([1] * 2032, DUAL)
    dream = make_canvas("dream")
    with pytest.raises(InvalidOption, match="denoising_steps=1"):
        dream.add_request([1], replace(DUAL, denoising_steps=1))


def test_requests_wait_for_memory(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada", replace(REFRESHED, host_memory_bytes=400_000), max_num_seqs=8)
    prompts = [random_prompt(120, n) for n in range(6)]
    expected = [tokens(run(engine, [prompt], DUAL))[0] for prompt in prompts]
    assert tokens(run(engine, prompts, DUAL)) == expected
    assert not leaks(engine)


def test_models_say_what_they_attend_to() -> None:
    for folder in FULL_FOLDERS:
        config = full_model(folder).config
        assert config.full_attention and config.shifted == (folder == "dream")

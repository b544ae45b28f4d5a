"""DiffusionGemma in the engine: published tokens with the published noise, dense and offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.engine.lanes import StepPlan
from herald.engine.request import Request
from herald.engine.reserve import reserve
from herald.errors import InvalidOption, PromptTooLong
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from tests.engine.support import check_resident_rows, random_prompt, run, tokens
from tests.support.golden import GOLDEN, Tapes, description, golden_model, tensors

FOLDER = "diffusion_gemma"
DENSE = OffloadConfig(enabled=False)
SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
OFFLOADS = {
    "dense": DENSE,
    "budget_1": OffloadConfig(kv_budget=1.0),
    "budget_1_all_rows_travel": OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True),
    "looks_ahead_with_the_canvas": OffloadConfig(kv_budget=1.0, lookahead_context="block"),
}
CASES = description(FOLDER)["decode"]
MakeGemma = Callable[..., Engine]


@pytest.fixture
def make_gemma() -> Iterator[MakeGemma]:
    """``make_gemma(offload, tapes, **limits)``: engines that are closed after the test."""
    engines: list[Engine] = []

    def make(offload: OffloadConfig = DENSE, tapes: Tapes | None = None, **limits: int) -> Engine:
        model = golden_model(FOLDER)
        engine = Engine(model, Tokenizer(GOLDEN / FOLDER), offload, EngineConfig(**limits), 0, poison=True)
        if tapes is not None:
            engine.decoder.noise = tapes
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def sampling(params: dict[str, Any], seed: int | None = None, **more: Any) -> SamplingParams:
    """What a case asks for."""
    return SamplingParams(
        max_tokens=params["max_new_tokens"],
        denoising_steps=params["max_denoising_steps"],
        entropy_bound=params["entropy_bound"],
        stop_entropy=params["confidence_threshold"],
        seed=seed,
        **more,
    )


def expected(case: dict[str, Any]) -> list[int]:
    """The output up to its first end token; what follows in the published one is padding."""
    ids, ends = case["output_ids"], case["params"]["eos_token_ids"]
    found = [i for i, token in enumerate(ids) if token in ends]
    return ids[: found[0] + 1] if found else ids


@pytest.mark.parametrize("offload", OFFLOADS)
def test_golden_tokens(make_gemma: MakeGemma, offload: str) -> None:
    engine = make_gemma(OFFLOADS[offload], Tapes(FOLDER, CASES))
    usual = engine.model.config
    for seed, case in enumerate(CASES):
        engine.model.config = replace(usual, eos_token_ids=tuple(case["params"]["eos_token_ids"]))
        (request,) = run(engine, [case["prompt_ids"]], sampling(case["params"], seed))
        assert request.output_ids == expected(case), case["name"]
        assert request.counters.steps == case["forwards"]["decoder"]
        assert request.finish_reason == ("stop" if case["name"].startswith("eos") else "length")


@pytest.mark.parametrize("offload", ["dense", "budget_1_all_rows_travel"])
def test_all_cases_in_one_batch(make_gemma: MakeGemma, offload: str) -> None:
    """Canvases at different steps share forwards, with final lanes between them, and keep their tokens."""
    engine = make_gemma(OFFLOADS[offload], Tapes(FOLDER, CASES), max_num_seqs=4)
    usual = engine.model.config.eos_token_ids
    chosen = [i for i, case in enumerate(CASES) if tuple(case["params"]["eos_token_ids"]) == usual]
    assert len(chosen) > 2
    prompts = [CASES[i]["prompt_ids"] for i in chosen]
    requests = run(engine, prompts, [sampling(CASES[i]["params"], i) for i in chosen])
    assert tokens(requests) == [expected(CASES[i]) for i in chosen]


def test_wrong_noise_or_rules_are_visible(make_gemma: MakeGemma) -> None:
    case = next(case for case in CASES if case["name"] == "fixed_long_p19")
    seed = CASES.index(case)
    right = sampling(case["params"], seed)
    engine = make_gemma(DENSE, Tapes(FOLDER, CASES))
    for wrong in (
        replace(right, seed=0),
        replace(right, entropy_bound=0.1),
        replace(right, denoising_steps=4),
    ):
        (request,) = run(engine, [case["prompt_ids"]], wrong)
        assert request.output_ids != expected(case), wrong


def test_a_canvas_that_is_stable_and_certain_ends_early(make_gemma: MakeGemma) -> None:
    case = next(case for case in CASES if case["name"] == "early_stop_p9")
    right, most = sampling(case["params"], CASES.index(case)), case["params"]["max_denoising_steps"]
    engine = make_gemma(DENSE, Tapes(FOLDER, CASES))
    (early,) = run(engine, [case["prompt_ids"]], right)
    (late,) = run(engine, [case["prompt_ids"]], replace(right, stop_entropy=0.0))
    assert early.counters.steps == case["forwards"]["decoder"] < late.counters.steps == 3 * most


LENGTHS = (1, 7, 8, 9, 63, 64, 65, 127, 131, 200, 331)
FIXED = SamplingParams(max_tokens=29, denoising_steps=5, entropy_bound=2.0, ignore_eos=True)


@pytest.mark.parametrize(
    "offload",
    ["budget_1", "budget_1_all_rows_travel", "looks_ahead_with_the_canvas"],
)
def test_budget_one_is_dense_on_every_edge_of_a_prompt(make_gemma: MakeGemma, offload: str) -> None:
    """Prompts end anywhere in a page and in the ring of a window, blocks go over the ends of pages."""
    prompts = [random_prompt(n, n, 270) for n in LENGTHS]
    many = [replace(FIXED, seed=n, stop_entropy=(None, 0.0, 0.5)[n % 3]) for n in LENGTHS]
    dense = run(make_gemma(DENSE, prefill_chunk=64), prompts, many)
    assert len({tuple(r.output_ids) for r in dense}) == len(LENGTHS)
    engine = make_gemma(OFFLOADS[offload], prefill_chunk=64)
    found = run(engine, prompts, many, lambda running: check_resident_rows(engine, running) and None)
    assert tokens(found) == tokens(dense)
    if offload == "budget_1_all_rows_travel":
        assert sum(r.counters.rows_moved for r in found) > 0


def test_requests_do_not_see_their_batch(make_gemma: MakeGemma) -> None:
    prompts = [random_prompt(n, n, 270) for n in (40, 21, 150, 8)]
    warm = replace(FIXED, temperature=0.8, seed=5)
    many = [replace(FIXED, seed=1), warm, replace(FIXED, seed=2, stop_entropy=0.0), replace(FIXED, seed=3)]
    offload = OffloadConfig(kv_budget=0.3, **SMALL)
    engine = make_gemma(offload, max_num_seqs=4)
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, many, strict=True)]
    assert tokens(run(engine, prompts, many)) == alone
    assert tokens(run(engine, [prompts[1]], replace(warm, temperature=0.0)))[0] != alone[1]
    assert tokens(run(engine, [prompts[0]], replace(FIXED, seed=9)))[0] != alone[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_late": "proceed"},
        {"refresh_step": 1, "refresh_lag": 1},
        {"lookahead": "late"},
        {"index_bits": 4},
    ],
    ids=str,
)
def test_small_budgets_move_rows_and_keep_them_true(make_gemma: MakeGemma, options: dict[str, Any]) -> None:
    prompts = [random_prompt(n, n, 270) for n in (150, 331)]
    engine = make_gemma(OffloadConfig(kv_budget=0.2, verify_transfers=True, **SMALL, **options))
    params = replace(FIXED, stop_entropy=0.0, seed=4)
    compared: list[int] = []
    requests = run(engine, prompts, params, lambda r: compared.append(check_resident_rows(engine, r)))
    assert sum(compared) > 0
    for request in requests:
        assert len(request.output_ids) == 29
        assert request.counters.rows_moved > 0
        assert request.counters.lookaheads + request.counters.late_selections > 0
    layout = engine.memory.layout
    # rows of layers with a window are neither stored nor selected nor moved
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (1, 1, 32)
    assert engine.memory.windows is not None and engine.memory.windows.rows.shape[:2] == (2, 2)


def test_nothing_is_left_behind_after_an_abort(make_gemma: MakeGemma) -> None:
    engine = make_gemma(OffloadConfig(kv_budget=0.3, **SMALL), max_num_seqs=2)
    for steps in (0, 1, 3, 9):
        kept = engine.add_request(random_prompt(100, 1, 270), replace(FIXED, seed=1))
        gone = engine.add_request(random_prompt(90, 2, 270), replace(FIXED, seed=2))
        for _ in range(steps):
            engine.step()
        engine.abort(gone.request_id)
        while engine.has_work:
            engine.step()
        assert len(kept.output_ids) == 29 and gone.finish_reason == "abort"
        assert engine.retriever is not None and engine.memory.store is not None
        engine.retriever.drain()
        windows, allocator = engine.memory.windows, engine.memory.store.pool.allocator
        assert windows is not None and windows.idle and engine.memory.arena.idle
        assert allocator.num_free == allocator.num_pages


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"confidence_threshold": 0.7}, "confidence_threshold=0.7"),
        ({"editing_threshold": 0.5}, "editing_threshold=0.5"),
    ],
)
def test_options_without_a_meaning_are_refused(
    make_gemma: MakeGemma, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidOption, match=named):
        make_gemma().add_request([1, 2, 3], SamplingParams(**wrong))


def test_pictures_and_what_is_too_long_are_refused(make_gemma: MakeGemma) -> None:
    engine = make_gemma(max_model_len=64)
    with pytest.raises(InvalidOption, match="token id 270"):
        engine.add_request([1, 270, 3], SamplingParams())
    params = SamplingParams(max_tokens=17)
    with pytest.raises(PromptTooLong, match="at most 40 prompt tokens"):
        engine.add_request([5] * 41, params)
    engine.add_request([5] * 40, params)
    with pytest.raises(PromptTooLong, match="max_tokens below 57"):
        engine.add_request([5], SamplingParams(max_tokens=57))
    engine.add_request([5], SamplingParams(max_tokens=56))


def test_logits_that_are_not_finite_end_the_request(make_gemma: MakeGemma) -> None:
    from herald.errors import NonFiniteLogits

    engine = make_gemma()
    engine.model.final_norm = torch.full_like(engine.model.final_norm, float("nan"))  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteLogits):
        run(engine, [[1, 2, 3]], FIXED)


def test_the_tapes_are_those_of_the_published_run() -> None:
    for case in CASES:
        tape = tensors(FOLDER)[f"case.{case['name']}.noise"]
        for step in case["steps"]:
            accepted, noise = set(step["accepted"]), tape[step["canvas"], step["step"]].tolist()
            for i, token in enumerate(step["next_canvas"]):
                assert token == (step["argmax"][i] if i in accepted else noise[i])


@pytest.mark.parametrize("offload", ["dense", "budget_1_all_rows_travel"])
def test_padded_steps_change_nothing(
    make_gemma: MakeGemma, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    """Lanes, blocks, final lanes and captures beyond those of the step, as recorded steps have them."""
    exact = StepPlan.shape
    monkeypatch.setattr(StepPlan, "shape", lambda self, draws, _, edits=False: exact(self, draws, 7, edits))
    engine = make_gemma(OFFLOADS[offload], Tapes(FOLDER, CASES), max_num_seqs=4)
    usual = engine.model.config.eos_token_ids
    chosen = [i for i, case in enumerate(CASES) if tuple(case["params"]["eos_token_ids"]) == usual]
    requests = run(
        engine, [CASES[i]["prompt_ids"] for i in chosen], [sampling(CASES[i]["params"], i) for i in chosen]
    )
    assert tokens(requests) == [expected(CASES[i]) for i in chosen]
    prompts = [random_prompt(n, n, 270) for n in (70, 21, 150)]
    found = tokens(run(engine, prompts, [replace(FIXED, seed=i) for i in range(3)]))
    monkeypatch.setattr(StepPlan, "shape", exact)
    plain = make_gemma(OFFLOADS[offload], Tapes(FOLDER, CASES), max_num_seqs=4)
    assert tokens(run(plain, prompts, [replace(FIXED, seed=i) for i in range(3)])) == found


def test_stored_rows_do_not_depend_on_what_follows(make_gemma: MakeGemma) -> None:
    """Rows of a page are those of the prompt that ends with it, and of the canvas that was written there."""
    engine = make_gemma(OFFLOADS["budget_1"], prefill_chunk=64)
    prompt = random_prompt(150, 3, 270)

    def rows_of(ids: list[int], pages: int) -> torch.Tensor:
        """[kv_heads, pages * size, width] once a block is stored."""
        found: list[torch.Tensor] = []

        def keep(live: list[Request]) -> None:
            assert engine.memory.store is not None and engine.retriever is not None
            if not found and live and live[0].counters.blocks > 1:
                engine.retriever.drain()
                rows = engine.memory.store.pool.rows[0][live[0].pages[:pages]]
                found.append(rows.transpose(0, 1).flatten(1, 2).clone())

        run(engine, [ids], replace(FIXED, seed=1, max_tokens=40), keep)
        return found[0]

    alone, followed = rows_of(prompt[:64], 1), rows_of(prompt, 1)
    assert (alone - followed).abs().max() < 1e-4 and alone.abs().max() > 0.1
    # what was decoded behind 150 positions, given as a prompt: blocks there go over the end of a page
    (request,) = run(engine, [prompt], replace(FIXED, seed=1, max_tokens=40))
    decoded, given = rows_of(prompt, 3), rows_of(prompt + request.output_ids[:32], 3)
    assert (decoded[:, :158] - given[:, :158]).abs().max() < 1e-4


def test_reserved_memory_serves_as_many_requests_as_were_asked_for(make_gemma: MakeGemma) -> None:
    """The rings of layers with a window are reserved with the rest."""
    engine = make_gemma(OffloadConfig(enabled=False), max_num_seqs=4)
    reserve(engine, 4 * engine.max_model_len)
    params = SamplingParams(max_tokens=engine.model.config.block_length, ignore_eos=True)
    engine.add_request([1] * 20, params)
    engine.step()
    for seed in (2, 3, 4):
        engine.add_request([seed] * 20, params)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 4

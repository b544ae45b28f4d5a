"""Fast-dLLM v2: the published decoding, token for token, dense and through the host pool."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from herald.config import OffloadConfig
from herald.engine.prefill import NO_VOTE, asking
from herald.engine.request import Request
from herald.errors import InvalidOption
from herald.models import BlockModel
from herald.models.fast_dllm_v2 import FastDllmV2Model
from herald.sampling_params import SamplingParams
from tests.engine.support import check_resident_rows, random_prompt, run, tokens
from tests.engine.test_budget_one import edge_lengths
from tests.support.golden import FAST_FOLDERS, description
from tests.support.golden_engines import MakeGolden, golden_engines
from tests.support.reference_fast_dllm import reference_fast_dllm

TIED = "fast_dllm_v2_bd8_tied"
OFFLOADS = {
    "dense": OffloadConfig(enabled=False),
    "budget_1": OffloadConfig(kv_budget=1.0),
    "budget_1_all_rows_travel": OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True),
}


@pytest.fixture
def make_fast() -> Iterator[MakeGolden]:
    """``make_fast(folder, offload, **limits)``: engines that are closed after the test."""
    yield from golden_engines()


def sampling(case: dict[str, Any]) -> SamplingParams:
    """What a case asks for; its output also holds the token that the last final lane predicts."""
    params, output = case["params"], case["output_ids"]
    ended = output[-1] in params["eos_token_ids"]
    return SamplingParams(
        max_tokens=params["max_new_tokens"] if ended else len(output),
        confidence_threshold=params["threshold"],
        sub_block_length=params["sub_block_length"],
    )


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("folder", FAST_FOLDERS)
def test_golden_tokens(make_fast: MakeGolden, folder: str, offload: str) -> None:
    engine = make_fast(folder, OFFLOADS[offload])
    for case in description(folder)["decode"]:
        eos = tuple(case["params"]["eos_token_ids"])
        engine.model.config = replace(engine.model.config, eos_token_ids=eos)
        (request,) = run(engine, [case["prompt_ids"]], sampling(case))
        assert request.output_ids == case["output_ids"], case["name"]
        assert request.finish_reason == ("stop" if "stop" in case["name"] else "length"), case["name"]
        assert request.counters.steps == case["forwards"]["denoise"], case["name"]


SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
SPARSE = OffloadConfig(kv_budget=0.2, **SMALL)
SETTINGS = [
    SamplingParams(max_tokens=21, confidence_threshold=0.9),
    SamplingParams(max_tokens=13, confidence_threshold=0.3, sub_block_length=4),
    SamplingParams(max_tokens=26, confidence_threshold=None, sub_block_length=2),
    SamplingParams(max_tokens=9, confidence_threshold=None, denoising_steps=2, sub_block_length=4),
    SamplingParams(max_tokens=17, confidence_threshold=0.5, sub_block_length=1),
]


def expected_tokens(model: BlockModel, prompt: list[int], params: SamplingParams) -> list[int]:
    quota = 1 if not params.denoising_steps else model.config.block_length // params.denoising_steps
    threshold = float("inf") if params.confidence_threshold is None else params.confidence_threshold
    length = params.sub_block_length or min(8, model.config.block_length)
    eos = model.config.eos_token_ids
    return reference_fast_dllm(model, prompt, params.max_tokens, length, threshold, quota, eos)


@pytest.mark.parametrize("end_tokens", [(), (156, 27)], ids=["no_end", "end_tokens"])
def test_every_prompt_length_and_setting(make_fast: MakeGolden, end_tokens: tuple[int, ...]) -> None:
    engine = make_fast(TIED, OFFLOADS["dense"])
    engine.model.config = replace(engine.model.config, eos_token_ids=end_tokens)
    lengths = [*range(1, 18), 24, 63, 64, 65]
    prompts = [random_prompt(n, n) for n in lengths]
    params = [SETTINGS[i % len(SETTINGS)] for i in range(len(prompts))]
    found = tokens(run(engine, prompts, params))
    for prompt, each, output in zip(prompts, params, found, strict=True):
        assert output == expected_tokens(engine.model, prompt, each), (len(prompt), each)
    assert any(set(end_tokens).intersection(output) for output in found) == bool(end_tokens)


@pytest.mark.parametrize("folder", FAST_FOLDERS)
def test_all_cases_in_one_batch(make_fast: MakeGolden, folder: str) -> None:
    """Requests at different steps of different blocks share forwards and keep their tokens."""
    engine = make_fast(folder, OFFLOADS["budget_1_all_rows_travel"], max_num_seqs=4)
    usual = description(folder)["eos_token_ids"]
    engine.model.config = replace(engine.model.config, eos_token_ids=tuple(usual))
    chosen = [c for c in description(folder)["decode"] if c["params"]["eos_token_ids"] == usual]
    requests = run(engine, [c["prompt_ids"] for c in chosen], [sampling(c) for c in chosen])
    assert tokens(requests) == [c["output_ids"] for c in chosen]


def test_budget_one_on_every_edge_of_a_prompt(make_fast: MakeGolden) -> None:
    lengths = edge_lengths(8, 500, 20, seed=5)
    prompts = [random_prompt(n, i) for i, n in enumerate(lengths)]
    params = [SETTINGS[i % len(SETTINGS)] for i in range(len(prompts))]
    expected = tokens(run(make_fast(TIED, OFFLOADS["dense"]), prompts, params))
    found = tokens(run(make_fast(TIED, OFFLOADS["budget_1_all_rows_travel"]), prompts, params))
    assert found == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lookahead_step": 4, "lookahead_context": "block"},
        {"lookahead": "late"},
        {"lookahead_step": 50},
        {"refresh_step": 2, "refresh_lag": 1},
        {"on_late": "proceed", "lookahead_step": 3},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "usual",
)
def test_lookaheads_of_long_prompts(make_fast: MakeGolden, changes: dict[str, Any]) -> None:
    """Selections come and go around lead steps; where everything is selected none of it can be seen."""
    prompts = [random_prompt(n, n) for n in (144, 331)]
    for params in (
        SamplingParams(max_tokens=40, confidence_threshold=0.6, ignore_eos=True),
        SamplingParams(max_tokens=40, confidence_threshold=None, ignore_eos=True),
    ):
        expected = tokens(run(make_fast(TIED, OFFLOADS["dense"]), prompts, params))
        whole = replace(OFFLOADS["budget_1_all_rows_travel"], **changes)
        assert tokens(run(make_fast(TIED, whole), prompts, params)) == expected
        engine = make_fast(TIED, replace(SPARSE, **changes))
        requests = run(engine, prompts, params, partial(check_resident_rows, engine))
        assert all(len(r.output_ids) == 40 and r.counters.rows_moved > 0 for r in requests)


def test_a_late_set_is_chosen_by_the_blocks_own_lane(make_fast: MakeGolden) -> None:
    """With ``"proceed"`` and no look-ahead in time, a block's first step behind its lead step selects."""
    offload = replace(SPARSE, on_late="proceed", lookahead_step=50)
    params = SamplingParams(max_tokens=60, ignore_eos=True, confidence_threshold=None)
    applied: set[int] = set()

    def watch(live: list[Request]) -> None:
        time.sleep(0.002)
        applied.update(r.selected_block for r in live)

    (request,) = run(make_fast(TIED, offload), [random_prompt(300, 6)], params, watch)
    assert request.counters.lookaheads == 0 and request.counters.boundary_selections == 0
    assert len(applied) >= 5


def test_the_token_before_the_masks_chooses_rows(make_fast: MakeGolden) -> None:
    """It predicts the first of them, so prefill lets it vote."""
    engine = make_fast(TIED, SPARSE)
    asked: list[list[bool]] = []
    scores = engine.first_scores

    def watch(q: torch.Tensor, lse: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append((lse < NO_VOTE).all(1).tolist())
        return scores(q, lse, *rest)

    engine.first_scores = watch
    run(engine, [random_prompt(131, 1)], SamplingParams(max_tokens=2))
    assert asked == [[False, False] + [True] * 6] * 2
    assert asking(torch.tensor([True, True]), True).tolist() == [True, True]
    assert asking(torch.tensor([False, False, True]), False).tolist() == [False, False, True]


def test_sampling_is_the_same_in_any_batch(make_fast: MakeGolden) -> None:
    engine = make_fast(TIED, OFFLOADS["budget_1"], max_num_seqs=3)
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    prompts = [random_prompt(n, 9) for n in (16, 21, 5)]
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(engine, prompts, params)) == alone
    other = replace(params[0], seed=99)
    assert tokens(run(engine, prompts[:1], other))[0] != alone[0]


def test_mask_ids_in_the_prompt_stay(make_fast: MakeGolden) -> None:
    engine = make_fast(TIED, OFFLOADS["budget_1"])
    mask = engine.model.config.mask_token_id
    for length in (13, 16, 3):
        prompt = random_prompt(length, length)
        prompt[-1] = prompt[length // 2] = mask
        (request,) = run(engine, [prompt], SETTINGS[0])
        assert request.output_ids == expected_tokens(engine.model, prompt, SETTINGS[0])


@pytest.mark.parametrize("shifted", [True, False])
def test_without_the_shift_the_tokens_are_others(make_fast: MakeGolden, shifted: bool) -> None:
    case = description("fast_dllm_v2")["decode"][0]
    engine = make_fast("fast_dllm_v2", OFFLOADS["dense"])
    engine.model.config = replace(engine.model.config, shifted=shifted)
    (request,) = run(engine, [case["prompt_ids"]], sampling(case))
    same = sum(a == b for a, b in zip(request.output_ids, case["output_ids"], strict=True))
    assert same == len(case["output_ids"]) if shifted else same < len(case["output_ids"]) // 2


@pytest.mark.parametrize("field", ["q", "k", "v"])
def test_without_a_bias_the_tokens_are_others(make_fast: MakeGolden, field: str) -> None:
    case = description(TIED)["decode"][0]
    engine = make_fast(TIED, OFFLOADS["dense"])
    assert isinstance(engine.model, FastDllmV2Model)
    for layer in engine.model.layers:
        assert layer.qkv_bias is not None
        layer.qkv_bias.split([64, 32, 32])["qkv".index(field)].zero_()
    (request,) = run(engine, [case["prompt_ids"]], sampling(case))
    assert request.output_ids != case["output_ids"]


def test_sub_blocks_that_cannot_be(make_fast: MakeGolden) -> None:
    engine = make_fast(TIED, OFFLOADS["dense"])
    with pytest.raises(InvalidOption, match=r"sub_block_length=3.*divisor of block_length=8"):
        engine.add_request([1, 2, 3], SamplingParams(sub_block_length=3))
    with pytest.raises(InvalidOption, match="editing_threshold"):
        engine.add_request([1, 2, 3], SamplingParams(editing_threshold=0.5))

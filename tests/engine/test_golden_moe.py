"""Families with experts: the published decoding, token for token, dense and through the host pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from herald.config import OffloadConfig
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams
from tests.engine.support import random_prompt, run, tokens
from tests.engine.test_budget_one import edge_lengths
from tests.support.golden import MOE_FOLDERS, description, golden_model
from tests.support.golden_engines import MakeGolden, golden_engines

OFFLOADS = {
    "dense": OffloadConfig(enabled=False),
    "budget_1": OffloadConfig(kv_budget=1.0),
    "budget_1_all_rows_travel": OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True),
}
EDITED = ["llada21_moe", "llada21_moe_mask_top"]


@pytest.fixture
def make_moe() -> Iterator[MakeGolden]:
    """``make_moe(folder, offload, **limits)``: engines that are closed after the test."""
    yield from golden_engines()


def sampling(params: dict[str, Any]) -> SamplingParams:
    """What a case of any of the families asks for."""
    edits = "editing_threshold" in params
    return SamplingParams(
        max_tokens=params["max_new_tokens"],
        denoising_steps=0 if edits else params.get("steps", params.get("denoising_steps")),
        confidence_threshold=params.get("threshold"),
        editing_threshold=params.get("editing_threshold"),
        max_post_steps=params.get("max_post_steps", 0),
        block_length=params["block_length"],
    )


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("folder", MOE_FOLDERS)
def test_golden_tokens(make_moe: MakeGolden, folder: str, offload: str) -> None:
    engine = make_moe(folder, OFFLOADS[offload])
    for case in description(folder)["decode"]:
        params = case["params"]
        engine.model.config = replace(engine.model.config, eos_token_ids=tuple(params["eos_token_ids"]))
        (request,) = run(engine, [case["prompt_ids"]], sampling(params))
        assert request.output_ids == case["output_ids"], case["name"]
        if folder in EDITED:
            # an end token ends our output and not the published one, which is cut afterwards
            assert request.counters.steps <= case["forwards"]["denoise"], case["name"]
            ends = set(params["eos_token_ids"]).intersection(case["sequence_ids"])
            assert ends or request.counters.steps == case["forwards"]["denoise"], case["name"]


@pytest.mark.parametrize("folder", MOE_FOLDERS)
def test_all_cases_in_one_batch(make_moe: MakeGolden, folder: str) -> None:
    """Requests at different steps of different blocks share forwards and keep their tokens."""
    engine = make_moe(folder, OFFLOADS["budget_1_all_rows_travel"], max_num_seqs=4)
    usual = tuple(description(folder)["eos_token_ids"])
    engine.model.config = replace(engine.model.config, eos_token_ids=usual)
    chosen = [c for c in description(folder)["decode"] if tuple(c["params"]["eos_token_ids"]) == usual]
    requests = run(engine, [c["prompt_ids"] for c in chosen], [sampling(c["params"]) for c in chosen])
    assert tokens(requests) == [c["output_ids"] for c in chosen]


@pytest.mark.parametrize("folder", ["sdar_moe", "llada2_moe"])
def test_budget_one_on_every_edge_of_a_prompt(make_moe: MakeGolden, folder: str) -> None:
    lengths = edge_lengths(golden_model(folder).config.block_length, 500, 20, seed=5)
    prompts = [random_prompt(n, i) for i, n in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=5 + 7 * (i % 3), confidence_threshold=(None, 0.3, 0.9)[i % 3])
        for i in range(len(prompts))
    ]
    expected = tokens(run(make_moe(folder, OFFLOADS["dense"]), prompts, params))
    found = tokens(run(make_moe(folder, OFFLOADS["budget_1_all_rows_travel"]), prompts, params))
    assert found == expected


def test_edited_and_plain_requests_share_a_batch(make_moe: MakeGolden) -> None:
    engine = make_moe("llada21_moe", OFFLOADS["budget_1"], max_num_seqs=4)
    plain = SamplingParams(max_tokens=24, confidence_threshold=0.8, ignore_eos=True)
    edited = replace(plain, confidence_threshold=0.5, editing_threshold=0.0)
    warm = replace(edited, temperature=0.7, seed=3)
    prompts = [random_prompt(n, n) for n in (30, 21, 11)]
    params = [plain, edited, warm]
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(engine, prompts, params)) == alone
    assert tokens(run(engine, prompts[1:2], plain))[0] != alone[1]


@pytest.mark.parametrize("budget", [1.0, 0.3])
def test_edited_blocks_of_long_prompts(make_moe: MakeGolden, budget: float) -> None:
    """Selections run while a block is edited; at budget 1.0 nothing of them can be seen."""
    small = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
    prompts = [random_prompt(n, n) for n in (150, 331)]
    params = SamplingParams(
        max_tokens=32, confidence_threshold=0.6, editing_threshold=0.4, max_post_steps=6, ignore_eos=True
    )
    expected = tokens(run(make_moe("llada21_moe", OFFLOADS["dense"]), prompts, params))
    requests = run(make_moe("llada21_moe", OffloadConfig(kv_budget=budget, **small)), prompts, params)
    if budget == 1.0:
        assert tokens(requests) == expected
    else:
        assert all(len(r.output_ids) == 32 and r.counters.rows_moved > 0 for r in requests)


def test_editing_needs_a_family_that_was_trained_for_it(make_moe: MakeGolden) -> None:
    engine = make_moe("sdar_moe", OFFLOADS["dense"])
    with pytest.raises(InvalidOption, match=r"editing_threshold=0\.5"):
        engine.add_request([1, 2, 3], SamplingParams(editing_threshold=0.5))

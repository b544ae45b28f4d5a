"""Families with experts on a CUDA device: recorded steps, published tokens, edited blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from herald.config import OffloadConfig
from herald.sampling_params import SamplingParams
from tests.engine.support import random_prompt, run, tokens
from tests.engine.test_golden_moe import sampling
from tests.support.golden import MOE_FOLDERS, description
from tests.support.golden_engines import MakeGolden, golden_engines

pytestmark = pytest.mark.gpu

DENSE = OffloadConfig(enabled=False)
ALL_ROWS_TRAVEL = OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True)
SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)


@pytest.fixture
def make_moe() -> Iterator[MakeGolden]:
    """``make_moe(folder, offload, dtype, **limits)``: engines that are closed after the test."""
    yield from golden_engines("cuda")


@pytest.mark.parametrize("offload", [DENSE, ALL_ROWS_TRAVEL], ids=["dense", "budget_1"])
@pytest.mark.parametrize("folder", MOE_FOLDERS)
def test_golden_tokens_in_float32(make_moe: MakeGolden, folder: str, offload: OffloadConfig) -> None:
    engine = make_moe(folder, offload)
    for case in description(folder)["decode"]:
        eos = tuple(case["params"]["eos_token_ids"])
        engine.model.config = replace(engine.model.config, eos_token_ids=eos)
        (request,) = run(engine, [case["prompt_ids"]], sampling(case["params"]))
        assert request.output_ids == case["output_ids"], case["name"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("sdar_moe", {"confidence_threshold": None, "denoising_steps": 2}),
        ("llada2_moe", {"confidence_threshold": 0.5}),
        ("llada21_moe", {"confidence_threshold": 0.5, "editing_threshold": 0.2, "max_post_steps": 6}),
    ],
)
def test_graphs_change_no_token(
    make_moe: MakeGolden, folder: str, changes: dict[str, float], dtype: torch.dtype
) -> None:
    """Recorded steps give what kernel by kernel steps give; experts come and go between replays."""
    prompts = [random_prompt(n, n) for n in (3, 90, 170, 260)]
    params = replace(SamplingParams(max_tokens=44, ignore_eos=True), **changes)
    found = []
    for graphs in (False, True):
        engine = make_moe(folder, SPARSE, dtype, cuda_graphs=graphs)
        found.append([tokens(run(engine, [prompt], params))[0] for prompt in prompts])
        assert engine.runner.use_graphs == graphs and len(engine.runner.programs) > 0
    assert found[0] == found[1]


def test_edited_and_plain_requests_share_recorded_steps(make_moe: MakeGolden) -> None:
    engine = make_moe("llada21_moe", SPARSE)
    plain = SamplingParams(max_tokens=32, confidence_threshold=0.8, ignore_eos=True)
    edited = replace(plain, confidence_threshold=0.5, editing_threshold=0.2, max_post_steps=6)
    prompts, params = [random_prompt(90, 1), random_prompt(61, 2)], [plain, edited]
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(engine, prompts, params)) == alone

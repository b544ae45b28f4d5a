"""Fast-dLLM v2 on a CUDA device: recorded steps, lead steps, published tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from herald.config import OffloadConfig
from herald.sampling_params import SamplingParams
from tests.engine.support import random_prompt, run, tokens
from tests.engine.test_golden_fast_dllm import SETTINGS, TIED, sampling
from tests.support.golden import FAST_FOLDERS, description
from tests.support.golden_engines import MakeGolden, golden_engines

pytestmark = pytest.mark.gpu

DENSE = OffloadConfig(enabled=False)
ALL_ROWS_TRAVEL = OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True)
SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def make_fast() -> Iterator[MakeGolden]:
    """``make_fast(folder, offload, dtype, **limits)``: engines that are closed after the test."""
    yield from golden_engines("cuda")


@pytest.mark.parametrize("offload", [DENSE, ALL_ROWS_TRAVEL], ids=["dense", "budget_1"])
@pytest.mark.parametrize("folder", FAST_FOLDERS)
def test_golden_tokens_in_float32(make_fast: MakeGolden, folder: str, offload: OffloadConfig) -> None:
    engine = make_fast(folder, offload)
    for case in description(folder)["decode"]:
        eos = tuple(case["params"]["eos_token_ids"])
        engine.model.config = replace(engine.model.config, eos_token_ids=eos)
        (request,) = run(engine, [case["prompt_ids"]], sampling(case))
        assert request.output_ids == case["output_ids"], case["name"]


@BOTH
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_graphs_change_no_token(make_fast: MakeGolden, params: SamplingParams, dtype: torch.dtype) -> None:
    """Recorded steps, lead steps among them, give what kernel by kernel steps give."""
    prompts = [random_prompt(n, n) for n in (3, 96, 171, 264)]
    longer = replace(params, max_tokens=44, ignore_eos=True)
    found = []
    for graphs in (False, True):
        engine = make_fast(TIED, SPARSE, dtype, cuda_graphs=graphs)
        found.append([tokens(run(engine, [prompt], longer))[0] for prompt in prompts])
        assert engine.runner.use_graphs == graphs and len(engine.runner.programs) > 0
    assert found[0] == found[1]


def test_budget_one_equals_dense(make_fast: MakeGolden) -> None:
    """Rows that travelled are the rows that stayed, around lead steps too."""
    prompts = [random_prompt(n, n) for n in (64, 131, 200)]
    params = replace(SETTINGS[0], max_tokens=40, ignore_eos=True)
    engines = [make_fast("fast_dllm_v2", offload) for offload in (DENSE, ALL_ROWS_TRAVEL)]
    dense, offloaded = [[tokens(run(e, [p], params))[0] for p in prompts] for e in engines]
    assert dense == offloaded


def test_mixed_settings_share_recorded_steps(make_fast: MakeGolden) -> None:
    engine = make_fast(TIED, ALL_ROWS_TRAVEL, max_num_seqs=8)
    params = [replace(each, max_tokens=40, ignore_eos=True) for each in SETTINGS]
    prompts = [random_prompt(80 + 8 * i, i) for i in range(len(params))]
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(engine, prompts, params)) == alone

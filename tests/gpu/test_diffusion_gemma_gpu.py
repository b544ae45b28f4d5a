"""DiffusionGemma on a CUDA device: recorded steps, published tokens, canvases beside final lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.tokenizer import Tokenizer
from tests.engine.support import check_resident_rows, random_prompt, run, tokens
from tests.engine.test_diffusion_gemma import CASES, FIXED, FOLDER, expected, sampling
from tests.support.golden import GOLDEN, Tapes, golden_model

pytestmark = pytest.mark.gpu

DENSE = OffloadConfig(enabled=False)
ALL_ROWS_TRAVEL = OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True)
SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
MakeGemma = Callable[..., Engine]


@pytest.fixture
def make_gemma() -> Iterator[MakeGemma]:
    """``make_gemma(offload, dtype, tapes, **limits)``: engines that are closed after the test."""
    engines: list[Engine] = []

    def make(
        offload: OffloadConfig,
        dtype: torch.dtype = torch.float32,
        tapes: Tapes | None = None,
        **limits: int,
    ) -> Engine:
        model = golden_model(FOLDER, "cuda", dtype)
        engine = Engine(model, Tokenizer(GOLDEN / FOLDER), offload, EngineConfig(**limits), 0, poison=True)
        if tapes is not None:
            engine.decoder.noise = tapes
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("offload", [DENSE, ALL_ROWS_TRAVEL], ids=["dense", "budget_1"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_golden_tokens_in_float32(make_gemma: MakeGemma, offload: OffloadConfig, graphs: bool) -> None:
    engine = make_gemma(offload, tapes=Tapes(FOLDER, CASES, "cuda"), cuda_graphs=graphs)
    usual = engine.model.config
    for seed, case in enumerate(CASES):
        engine.model.config = replace(usual, eos_token_ids=tuple(case["params"]["eos_token_ids"]))
        (request,) = run(engine, [case["prompt_ids"]], sampling(case["params"], seed))
        assert request.output_ids == expected(case), case["name"]
        assert request.counters.steps == case["forwards"]["decoder"]


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_change_no_token(make_gemma: MakeGemma, dtype: torch.dtype, temperature: float) -> None:
    """Recorded steps give what kernel by kernel steps give; padding of either kind stays harmless."""
    prompts = [random_prompt(n, n, 270) for n in (3, 90, 170, 261)]
    params = replace(FIXED, max_tokens=44, temperature=temperature, seed=6)
    found = []
    for graphs in (False, True):
        engine = make_gemma(SPARSE, dtype, cuda_graphs=graphs)
        found.append([tokens(run(engine, [prompt], params))[0] for prompt in prompts])
        assert engine.runner.use_graphs == graphs and len(engine.runner.programs) > 0
    assert found[0] == found[1]


@BOTH
def test_noise_is_that_of_the_cpu(make_gemma: MakeGemma, dtype: torch.dtype) -> None:
    engine = make_gemma(DENSE, dtype)
    ids = torch.tensor([1, 2**40, 2**62], device="cuda")
    there = engine.decoder.noise(ids, ids % 97, ids % 5, 64, 262_144)
    ids = ids.cpu()
    assert torch.equal(there.cpu(), engine.decoder.noise(ids, ids % 97, ids % 5, 64, 262_144))


def test_budget_one_equals_dense(make_gemma: MakeGemma) -> None:
    """Prompts end anywhere in a page and in a ring; rows that travelled are the rows that stayed."""
    prompts = [random_prompt(n, n, 270) for n in (5, 64, 131, 200)]
    params = replace(FIXED, max_tokens=40, seed=2)
    dense, offloaded = [
        [tokens(run(engine, [prompt], params))[0] for prompt in prompts]
        for engine in (make_gemma(DENSE), make_gemma(ALL_ROWS_TRAVEL))
    ]
    assert dense == offloaded


@BOTH
def test_a_batch_shares_recorded_steps(make_gemma: MakeGemma, dtype: torch.dtype) -> None:
    engine = make_gemma(SPARSE, dtype, max_num_seqs=8)
    prompts = [random_prompt(60 + 31 * i, i, 270) for i in range(6)]
    many = [replace(FIXED, seed=i, stop_entropy=(None, 0.0)[i % 2], max_tokens=20 + 7 * i) for i in range(6)]
    compared: list[int] = []
    requests = run(engine, prompts, many, lambda r: compared.append(check_resident_rows(engine, r)))
    assert [len(r.output_ids) for r in requests] == [each.max_tokens for each in many]
    assert sum(compared) > 0 and sum(r.counters.rows_moved for r in requests) > 0
    assert engine.memory.windows is not None and engine.memory.windows.idle

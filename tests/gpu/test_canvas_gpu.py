"""Families with full attention on a CUDA device: published tokens, recorded steps, memory they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from bench_longctx.throughput import synthetic
from herald.config import EngineConfig, OffloadConfig
from herald.engine import hidden_states
from herald.engine.canvas import CanvasEngine, full_forward
from herald.engine.factory import make_engine
from herald.models import BlockModel
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from tests.engine.support import check_resident_rows, random_prompt, run, tokens
from tests.engine.test_golden_canvas import sampling
from tests.support.golden import FULL_FOLDERS, GOLDEN, description, full_model

pytestmark = pytest.mark.gpu

DENSE = OffloadConfig(enabled=False)
BUDGET_ONE = OffloadConfig(kv_budget=1.0)
ALL_ROWS_TRAVEL = OffloadConfig(
    kv_budget=1.0, refresh_step=1, refresh_lag=1, difference_only=False, verify_transfers=True
)
SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
DUAL = SamplingParams(max_tokens=24, block_length=8, cache="dual", ignore_eos=True)
MakeCanvas = Callable[..., CanvasEngine]


def engine_of(model: BlockModel, offload: OffloadConfig, **limits: int) -> CanvasEngine:
    tokenizer = Tokenizer(GOLDEN / "llada")
    engine = make_engine(model, tokenizer, offload, EngineConfig(**limits), seed=0, poison=True)
    assert isinstance(engine, CanvasEngine)
    return engine


@pytest.fixture
def make_canvas() -> Iterator[MakeCanvas]:
    """``make_canvas(folder, offload, dtype, **limits)``: engines that are closed after the test."""
    engines: list[CanvasEngine] = []

    def make(
        folder: str, offload: OffloadConfig, dtype: torch.dtype = torch.float32, **limits: int
    ) -> CanvasEngine:
        engines.append(engine_of(full_model(folder, "cuda", dtype), offload, **limits))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("offload", [DENSE, BUDGET_ONE, ALL_ROWS_TRAVEL], ids=["dense", "one", "travel"])
@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_golden_tokens_in_float32(make_canvas: MakeCanvas, folder: str, offload: OffloadConfig) -> None:
    engine = make_canvas(folder, offload)
    for case in description(folder)["decode"]:
        (request,) = run(engine, [case["prompt_ids"]], sampling(case["params"]))
        assert request.output_ids == case["output_ids"], case["name"]


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_all_cases_in_one_batch(make_canvas: MakeCanvas, folder: str) -> None:
    engine = make_canvas(folder, BUDGET_ONE, max_num_seqs=6, tokens_per_step=64)
    cases = description(folder)["decode"]
    requests = run(engine, [c["prompt_ids"] for c in cases], [sampling(c["params"]) for c in cases])
    assert tokens(requests) == [c["output_ids"] for c in cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_graphs_change_no_token(
    make_canvas: MakeCanvas, folder: str, threshold: float | None, dtype: torch.dtype
) -> None:
    """Recorded steps give what kernel by kernel steps give."""
    prompts = [random_prompt(n, n) for n in (3, 90, 170, 260)]
    params = replace(DUAL, confidence_threshold=threshold)
    found = []
    for graphs in (False, True):
        engine = make_canvas(folder, SPARSE, dtype, cuda_graphs=graphs)
        found.append([tokens(run(engine, [prompt], params))[0] for prompt in prompts])
        assert len(set(map(tuple, found[-1]))) == 4
    assert found[0] == found[1]


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_budget_one_in_bfloat16(make_canvas: MakeCanvas, folder: str) -> None:
    prompts = [random_prompt(n, n) for n in (1, 65, 200, 331)]
    for params in (DUAL, replace(DUAL, cache="prefix")):
        expected = tokens(run(make_canvas(folder, DENSE, torch.bfloat16), prompts, params))
        assert tokens(run(make_canvas(folder, BUDGET_ONE, torch.bfloat16), prompts, params)) == expected


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_chunks_and_streamed_hidden_states(
    make_canvas: MakeCanvas, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(n, n) for n in (150, 331, 700)]
    expected = tokens(run(make_canvas(folder, DENSE), prompts, DUAL))
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 0)
    monkeypatch.setattr(full_forward, "KEPT_BYTES", 0)
    for _ in range(3):
        assert tokens(run(make_canvas(folder, DENSE, prefill_chunk=64), prompts, DUAL)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_refresh_brings_the_pools_rows(make_canvas: MakeCanvas, dtype: torch.dtype) -> None:
    engine = make_canvas("dream", replace(SPARSE, refresh_step=2, verify_transfers=True), dtype)
    compared = 0

    def compare(requests: list) -> None:
        nonlocal compared
        quiet = [request for request in requests if request.full is None and request.selection is None]
        torch.cuda.synchronize()
        compared += check_resident_rows(engine, quiet)

    requests = run(engine, [random_prompt(n, n) for n in (150, 331)], DUAL, compare)
    assert compared > 0 and all(request.counters.rows_moved > 0 for request in requests)


def test_a_request_decodes_the_same_beside_others(make_canvas: MakeCanvas) -> None:
    engine = make_canvas("llada_moe", SPARSE, tokens_per_step=64, max_num_seqs=4)
    prompts = [random_prompt(30 + 41 * i, i) for i in range(6)]
    params = [replace(DUAL, temperature=0.8 * (i % 2), seed=i, max_tokens=8 + 3 * i) for i in range(6)]
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(engine, prompts, params)) == alone


def test_memory_of_a_full_forward_grows_by_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the prompt takes the rows of one layer more, not those of eight, and no hidden states."""
    monkeypatch.setattr(hidden_states, "KEPT_BYTES", 0)
    monkeypatch.setattr(full_forward, "KEPT_BYTES", 0)
    monkeypatch.setitem(synthetic.TINY, "num_layers", 8)
    model = synthetic.random_model("dream-7b", 32, 1 << 18, torch.device("cuda"), tiny=True)
    offload = OffloadConfig(kv_budget=0.001, min_resident_rows=128)
    engine = engine_of(model, offload, prefill_chunk=1024)
    params = SamplingParams(max_tokens=32, block_length=32, cache="dual", denoising_steps=2)
    peaks = []
    for length in (1000, 50_000, 100_000):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(engine, [random_prompt(length, 1)], params)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    engine.close()
    config = model.config
    layer = config.num_kv_heads * 2 * config.head_dim * 2
    ids_and_scores = 8 * 4 + 16 * config.num_kv_heads  # tokens, positions, and what choosing rows takes
    assert peaks[2] - peaks[1] < 50_000 * (layer + ids_and_scores) * 1.5

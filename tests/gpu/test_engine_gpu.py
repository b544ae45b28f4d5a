"""The whole loop on a CUDA device: streams, events, pinned pool, Triton kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine import hidden_states
from herald.engine.engine import Engine
from herald.engine.memory import HostStore
from herald.engine.retriever import Retriever
from herald.models import load_model
from herald.sampling_params import SamplingParams
from herald.select import device_scan
from herald.tokenizer import Tokenizer
from tests.engine.conftest import DENSE, GOLDEN
from tests.engine.support import check_resident_rows, random_prompt, run, tokens

pytestmark = pytest.mark.gpu

SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
PARAMS = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=4)


def make(
    offload: OffloadConfig, dtype: torch.dtype = torch.float32, folder: str = "sdar_b8", **limits: int
) -> Engine:
    model = load_model(GOLDEN / folder, torch.device("cuda", 0), dtype)
    return Engine(model, Tokenizer(GOLDEN / folder), offload, EngineConfig(**limits), seed=0, poison=True)


@pytest.mark.parametrize("transfer", ["zero_copy", "staged"])
@pytest.mark.parametrize("difference_only", [True, False])
def test_golden_tokens_in_float32(transfer: str, difference_only: bool) -> None:
    offload = OffloadConfig(
        kv_budget=1.0, transfer=transfer, difference_only=difference_only, verify_transfers=True
    )
    engine = make(offload)
    for case in json.loads((GOLDEN / "sdar_b8" / "golden.json").read_text())["decode"]:
        params = case["params"]
        engine.model.config = replace(engine.model.config, eos_token_ids=tuple(params["eos_token_ids"]))
        sampling = SamplingParams(
            max_tokens=params["max_new_tokens"],
            denoising_steps=params["denoising_steps"],
            confidence_threshold=params.get("threshold"),
        )
        (request,) = run(engine, [case["prompt_ids"]], sampling)
        assert request.output_ids == case["output_ids"], case["name"]
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transfer", ["zero_copy", "staged"])
@pytest.mark.parametrize("bits", [16, 8])
def test_resident_rows_equal_the_pool(dtype: torch.dtype, transfer: str, bits: int) -> None:
    engine = make(OffloadConfig(kv_budget=0.2, transfer=transfer, index_bits=bits, **SMALL), dtype)
    compared: list[int] = []

    def check(live) -> None:
        torch.cuda.synchronize()
        compared.append(check_resident_rows(engine, live))

    requests = run(engine, [random_prompt(n, n) for n in (3, 61, 150, 333)], PARAMS, check)
    assert sum(compared) > 10_000
    assert requests[3].counters.rows_moved > 0
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("threshold", [None, 0.02], ids=["static", "threshold"])
def test_graphs_change_no_token(dtype: torch.dtype, threshold: float | None) -> None:
    """Recorded steps, one ahead of what the host has read, give what kernel by kernel steps give."""
    prompts = [random_prompt(n, n) for n in (3, 90, 170, 260)]
    params = replace(PARAMS, confidence_threshold=threshold)
    found = []
    for graphs in (False, True):
        engine = make(OffloadConfig(kv_budget=0.2, **SMALL), dtype, cuda_graphs=graphs)
        found.append([tokens(run(engine, [prompt], params))[0] for prompt in prompts])
        assert engine.runner.use_graphs == graphs and len(engine.runner.programs) > 0
        engine.close()
    assert found[0] == found[1]


def test_sampling_in_recorded_steps() -> None:
    """Requests that sample share recorded steps with greedy ones; neither notices."""
    greedy, warm = PARAMS, replace(PARAMS, temperature=0.8, top_k=40, seed=7)
    prompts = [random_prompt(90, 1), random_prompt(60, 2)]
    engine = make(OffloadConfig(kv_budget=0.2, **SMALL))
    alone = [tokens(run(engine, [p], q))[0] for p, q in zip(prompts, (greedy, warm), strict=True)]
    assert tokens(run(engine, prompts, [greedy, warm])) == alone
    assert tokens(run(engine, prompts[1:], replace(warm, seed=8)))[0] != alone[1]
    engine.close()


def test_sparse_tokens_of_the_cpu() -> None:
    """float32 on the GPU decodes what the CPU decodes, at a sparse budget."""
    offload = OffloadConfig(kv_budget=0.2, **SMALL)
    prompts = [random_prompt(n, n) for n in (90, 170, 260)]
    model = load_model(GOLDEN / "sdar_b8", torch.device("cpu"), torch.float32)
    cpu = Engine(model, Tokenizer(GOLDEN / "sdar_b8"), offload, EngineConfig(), seed=0)
    gpu = make(offload)
    assert tokens(run(gpu, prompts, PARAMS)) == tokens(run(cpu, prompts, PARAMS))
    cpu.close()
    gpu.close()


def test_stretched_transfers_change_nothing() -> None:
    """Copies that start late on their stream, on every block, give the same tokens."""
    prompts = [random_prompt(n, n) for n in (90, 170)]
    engine = make(OffloadConfig(kv_budget=0.2, **SMALL), torch.bfloat16)
    expected = tokens(run(engine, prompts, PARAMS))
    assert engine.memory.store is not None
    engine.memory.store.transfer.delay = lambda: torch.cuda._sleep(3_000_000)
    for _ in range(8):
        assert tokens(run(engine, prompts, PARAMS)) == expected
    engine.close()


@pytest.mark.parametrize("transfer", ["zero_copy", "staged"])
def test_sets_chosen_anew_within_a_block(transfer: str) -> None:
    """Steps wait for rows of their own queries, look-aheads are given up: the rows are the pool's, and late
    copies change no token."""
    prompts = [random_prompt(n, n) for n in (61, 150, 304)]
    unsure = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=0.6, denoising_steps=8)
    engine = make(OffloadConfig(kv_budget=0.2, transfer=transfer, verify_transfers=True, **SMALL))
    compared: list[int] = []

    def check(live) -> None:
        torch.cuda.synchronize()
        compared.append(check_resident_rows(engine, live))

    requests = run(engine, prompts, unsure, check)
    assert sum(compared) > 10_000
    for request in requests:
        counters = request.counters
        assert counters.forwards > counters.steps + counters.boundary_selections
    expected = tokens(requests)
    assert engine.memory.store is not None
    engine.memory.store.transfer.delay = lambda: torch.cuda._sleep(3_000_000)
    for _ in range(4):
        assert tokens(run(engine, prompts, unsure)) == expected
    engine.close()


def test_batch_does_not_matter() -> None:
    offload = OffloadConfig(kv_budget=0.2, **SMALL)
    prompts = [random_prompt(300, n) for n in range(4)]
    alone = []
    for prompt in prompts:
        engine = make(offload)
        alone += tokens(run(engine, [prompt], PARAMS))
        engine.close()
    engine = make(offload)
    assert tokens(run(engine, prompts, PARAMS)) == alone
    engine.close()


def test_dense_and_sparse_give_memory_back() -> None:
    """Also after several engines: what libraries keep for a stream is not kept again for each of them."""
    allocated = []
    for _ in range(3):
        for offload in (DENSE, OffloadConfig(kv_budget=0.2, **SMALL)):
            engine = make(offload, torch.bfloat16)
            run(engine, [random_prompt(200, 1)], PARAMS)
            engine.close()
            del engine
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] <= allocated[0] + (1 << 20)


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_scored_by_the_device_change_no_token(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two selections under way at a time and every layer up for grabs, or all on the device."""
    monkeypatch.setattr(device_scan, "LAYERS_LEFT", 0)
    prompts = [random_prompt(n, n) for n in (90, 170, 260, 300)]
    found = {}
    for share, held in [(False, 0), (True, 0), (True, 1 << 30)]:
        offload = OffloadConfig(
            kv_budget=0.2,
            index_bits=bits,  # type: ignore[arg-type]
            scan_on_device=share,
            index_device_bytes=held,
            **SMALL,
        )
        engine = make(offload)
        scans = []

        def every_selection(retriever: Retriever, store: HostStore, scans: list[Any] = scans) -> None:
            if store.selector.device_scan is not None:
                store.selector.device_scan._least = 0
                scans.append(store.selector.device_scan)

        engine.on_retriever = every_selection
        found[share, held] = [tokens(run(engine, prompts, PARAMS)) for _ in range(3)]
        assert [(scan.layers > 0, scan.holds_index) for scan in scans] == [(True, held > 0)] * share
        engine.close()
    first, *others = found.values()
    assert all(other == first for other in others)


def test_hidden_states_on_the_host_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(n, n) for n in (90, 300, 511)]
    found = []
    for kept in (1 << 30, 0):
        monkeypatch.setattr(hidden_states, "KEPT_BYTES", kept)
        engine = make(OffloadConfig(kv_budget=0.3, **SMALL), prefill_chunk=64)
        found.append([tokens(run(engine, prompts, PARAMS)) for _ in range(3)])
        engine.close()
    assert found[0] == found[1]

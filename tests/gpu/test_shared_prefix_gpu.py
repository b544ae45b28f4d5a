"""Shared pages on a CUDA device: rows that come back are those that left, whatever is late."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from herald import LLM, EngineConfig
from herald.config import OffloadConfig
from herald.engine.engine import Engine
from herald.engine.request import Phase, Request
from herald.models import load_model
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from herald.transfer import cuda as cuda_transfer
from tests.engine.conftest import GOLDEN
from tests.engine.support import check_resident_rows, leaks, random_prompt, run, tokens

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
SPARSE = OffloadConfig(kv_budget=0.2, **SMALL)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=None, denoising_steps=4)


def make(offload: OffloadConfig, dtype: torch.dtype = torch.float32, **limits: int) -> Engine:
    path = GOLDEN / "sdar_b8"
    model = load_model(path, torch.device("cuda", 0), dtype)
    config = EngineConfig(**{"prefill_chunk": 512, **limits})
    return Engine(model, Tokenizer(path), offload, config, seed=0, poison=True)


def alone(
    prompt: list[int], dtype: torch.dtype = torch.float32, offload: OffloadConfig = SPARSE
) -> list[int]:
    engine = make(replace(offload, prefix_sharing=False), dtype)
    (found,) = tokens(run(engine, [prompt], PARAMS))
    engine.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transfer", ["zero_copy", "staged"])
@pytest.mark.parametrize("piece_bytes", [1 << 12, 32 << 20])
def test_the_same_tokens_as_alone(
    dtype: torch.dtype, transfer: Any, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_transfer, "LOAD_BYTES", piece_bytes)
    offload = replace(SPARSE, transfer=transfer, verify_transfers=True)
    engine = make(offload, dtype)
    for length in (700, 1024):
        document = random_prompt(length, length)
        for question in (9, 33, 80):
            prompt = document + random_prompt(question, question)
            (request,) = run(
                engine, [prompt], PARAMS, lambda live: check_resident_rows(engine, live) and None
            )
            assert request.output_ids == alone(prompt, dtype, offload)
            assert (request.counters.cached_tokens > 0) == (question != 9)
    assert not leaks(engine)
    engine.close()


def test_late_copies_of_a_prefix_are_waited_for() -> None:
    """Loads that start late on their stream, in every layer, while other requests decode beside them."""
    document = random_prompt(1100, 1)
    prompts = [document + random_prompt(n, n) for n in (30, 41, 7, 60)]
    expected = [alone(prompt) for prompt in prompts]
    engine = make(SPARSE, max_num_seqs=4, tokens_per_step=16)
    run(engine, prompts[:1], PARAMS)
    assert engine.memory.store is not None
    engine.memory.store.transfer.delay = lambda: torch.cuda._sleep(3_000_000)
    for _ in range(3):
        requests = run(engine, prompts, PARAMS)
        assert tokens(requests) == expected
        assert all(request.counters.cached_tokens >= 1024 for request in requests)
    assert not leaks(engine)
    engine.close()


def test_aborts_at_any_moment() -> None:
    rng = random.Random(0)
    documents = [random_prompt(n, n) for n in (700, 450)]
    prompts = [d + random_prompt(n, n) for d in documents for n in (9, 33, 70)]
    expected = {id(prompt): alone(prompt) for prompt in prompts}
    layout = make(SPARSE).memory.layout
    offload = replace(SPARSE, host_memory_bytes=24 * layout.page_bytes)
    engine = make(offload, max_num_seqs=3, tokens_per_step=16)
    live: list[tuple[Request, list[int]]] = []
    done = 0
    for _ in range(400):
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
    assert done > 4 and engine.prefixes.stats.hits > 2 and not leaks(engine)
    engine.close()


def test_a_saved_document_comes_back(tmp_path: Path) -> None:
    document, question = random_prompt(700, 1), random_prompt(30, 2)
    config = EngineConfig(prefill_chunk=512)

    def open_llm(device: str) -> LLM:
        return LLM(GOLDEN / "sdar_b8", device=device, dtype="float32", offload=SPARSE, engine=config, seed=0)

    with open_llm("cuda") as llm:
        llm.save_prefix(document, tmp_path / "document")
    for device in ("cuda", "cpu"):  # a prefix belongs to a model, not to a device
        with open_llm(device) as llm:
            llm.load_prefix(tmp_path / "document")
            (output,) = llm.generate(prompt_token_ids=[document + question], sampling_params=PARAMS)
            assert output.metrics.cached_tokens == 640
            assert list(output.token_ids) == alone(document + question)

"""The engine gives the published decoding, token for token, dense and through the host pool."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from herald.config import OffloadConfig
from herald.models import ModelConfig
from herald.sampling_params import SamplingParams
from tests.engine.conftest import GOLDEN, MakeEngine
from tests.engine.support import run, tokens

OFFLOADS = {
    "dense": OffloadConfig(enabled=False),
    "budget_1": OffloadConfig(kv_budget=1.0),
    "budget_1_all_rows_travel": OffloadConfig(kv_budget=1.0, difference_only=False, verify_transfers=True),
}


def cases(folder: str) -> list[dict]:
    return json.loads((GOLDEN / folder / "golden.json").read_text())["decode"]


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("folder", ["sdar_b4", "sdar_b8"])
def test_golden_tokens(make_engine: MakeEngine, folder: str, offload: str) -> None:
    engine = make_engine(folder, OFFLOADS[offload])
    for case in cases(folder):
        params = case["params"]
        engine.model.config = _with_eos(engine.model.config, params["eos_token_ids"])
        sampling = SamplingParams(
            max_tokens=params["max_new_tokens"],
            denoising_steps=params["denoising_steps"],
            confidence_threshold=params.get("threshold"),
        )
        (request,) = run(engine, [case["prompt_ids"]], sampling)
        assert request.output_ids == case["output_ids"], case["name"]


@pytest.mark.parametrize("folder", ["sdar_b4", "sdar_b8"])
def test_all_cases_in_one_batch(make_engine: MakeEngine, folder: str) -> None:
    """Requests at different steps of different blocks share forwards and keep their tokens."""
    engine = make_engine(folder, OFFLOADS["budget_1_all_rows_travel"], max_num_seqs=4)
    chosen = [c for c in cases(folder) if c["params"]["eos_token_ids"] == [302, 300]]
    sampling = [
        SamplingParams(
            max_tokens=c["params"]["max_new_tokens"],
            denoising_steps=c["params"]["denoising_steps"],
            confidence_threshold=c["params"].get("threshold"),
        )
        for c in chosen
    ]
    requests = run(engine, [c["prompt_ids"] for c in chosen], sampling)
    assert tokens(requests) == [c["output_ids"] for c in chosen]


def _with_eos(config: ModelConfig, eos: list[int]) -> ModelConfig:
    return replace(config, eos_token_ids=tuple(eos))

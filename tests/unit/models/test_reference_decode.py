"""The reference decoder reproduces every published decode case, step by step."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch

from herald.models import BlockModel
from tests.support.golden import (
    LOGITS_TOLERANCE,
    MOE_FOLDERS,
    SDAR_FOLDERS,
    case_id,
    decode_cases,
    golden_model,
    tensors,
)
from tests.support.reference_decode import reference_decode


@cache
def model_of(folder: str, block_length: int | None = None) -> BlockModel:
    return golden_model(folder, block_length=block_length)


@pytest.mark.parametrize(("folder", "case"), decode_cases(*SDAR_FOLDERS, "sdar_moe"), ids=case_id)
def test_reproduces_the_published_loop(folder: str, case: dict[str, Any]) -> None:
    params = case["params"]
    result = reference_decode(
        model_of(folder),
        case["prompt_ids"],
        params["max_new_tokens"],
        params["denoising_steps"],
        params.get("threshold"),
        params["eos_token_ids"],
    )
    assert result.output_ids == case["output_ids"]
    assert result.sequence_ids == case["sequence_ids"]
    assert [asdict(step) for step in result.steps] == case["steps"]
    forwards = case["forwards"]
    assert len(result.steps) == forwards["denoise"]
    assert (result.prefill_forwards, result.commit_forwards) == (forwards["prefill"], forwards["commit"])


@pytest.mark.parametrize(("folder", "case"), decode_cases("llada2_moe"), ids=case_id)
def test_reproduces_the_loop_of_llada2(folder: str, case: dict[str, Any]) -> None:
    """Without a cache and commits, and with no more steps than tokens."""
    params = case["params"]
    result = reference_decode(
        model_of(folder, params["block_length"]),
        case["prompt_ids"],
        params["max_new_tokens"],
        min(params["steps"], params["max_new_tokens"] // params["minimal_topk"]),
        params["threshold"],
        params["eos_token_ids"],
    )
    assert result.output_ids == case["output_ids"]
    steps = [asdict(step) for step in result.steps]
    if not params.get("eos_early_stop"):
        assert result.sequence_ids == case["sequence_ids"] and len(steps) == case["forwards"]["denoise"]
    assert steps[: len(case["steps"])] == case["steps"]


@pytest.mark.parametrize(("folder", "case"), decode_cases(*SDAR_FOLDERS, *MOE_FOLDERS), ids=case_id)
def test_first_forward_of_a_case(folder: str, case: dict[str, Any]) -> None:
    model = model_of(folder, case["params"]["block_length"])
    block = model.config.block_length
    start = len(case["prompt_ids"]) // block * block
    masks = [case["params"]["mask_id"]] * (start + block - len(case["prompt_ids"]))
    logits = model.dense_logits(torch.tensor(case["prompt_ids"] + masks))[start:]
    expected = tensors(folder)[f"case.{case['name']}.logits0"]
    assert (logits - expected).abs().max() < LOGITS_TOLERANCE


def test_a_mask_token_in_the_prompt_is_kept() -> None:
    model = model_of("sdar_b4")
    prompt = [5, model.config.mask_token_id, 7, 8, 9, model.config.mask_token_id]
    result = reference_decode(model, prompt, 4, eos_token_ids=())
    assert result.sequence_ids[: len(prompt)] == prompt
    assert min(result.steps[0].positions) >= len(prompt)
    assert len(result.output_ids) == 4

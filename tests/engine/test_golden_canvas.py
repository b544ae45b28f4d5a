"""Families with full attention: the published decoding, token for token, dense and offloaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import OffloadConfig
from herald.engine.canvas import engine as canvas_engine
from herald.engine.canvas import windows
from herald.engine.canvas.commit import commit
from herald.engine.canvas.request import CanvasRequest
from herald.sampling_params import SamplingParams
from tests.engine.conftest import MakeCanvas
from tests.engine.support import run, tokens
from tests.support.golden import FULL_FOLDERS, description

OFFLOADS = {
    "dense": OffloadConfig(enabled=False),
    "budget_1": OffloadConfig(kv_budget=1.0),
    "budget_1_refreshed": OffloadConfig(
        kv_budget=1.0, refresh_step=1, refresh_lag=1, difference_only=False, verify_transfers=True
    ),
}


def sampling(params: dict[str, Any]) -> SamplingParams:
    """What a case of any of the families asks for."""
    count = params["max_new_tokens"]
    block = params.get("block_length", 0)
    alg = params.get("alg", "auto")
    return SamplingParams(
        max_tokens=count,
        denoising_steps=params["steps"] * block // count if block else params["steps"],
        confidence_threshold=params.get("threshold"),
        algorithm="auto" if alg == "confidence_threshold" else alg,
        cache=params.get("cache", "none"),
        block_length=block,
    )


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_golden_tokens(make_canvas: MakeCanvas, folder: str, offload: str) -> None:
    engine = make_canvas(folder, OFFLOADS[offload])
    for case in description(folder)["decode"]:
        params = case["params"]
        (request,) = run(engine, [case["prompt_ids"]], sampling(params))
        assert request.output_ids == case["output_ids"], case["name"]
        # the published loops run a forward even where the schedule takes nothing
        taking = sum(bool(step["positions"]) for step in case["steps"])
        assert request.counters.forwards == request.counters.steps == taking, case["name"]


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_all_cases_in_one_batch(make_canvas: MakeCanvas, folder: str) -> None:
    """Requests at different steps of different blocks share steps and keep their tokens."""
    engine = make_canvas(folder, OFFLOADS["budget_1"], max_num_seqs=6, tokens_per_step=64)
    cases = description(folder)["decode"]
    requests = run(engine, [c["prompt_ids"] for c in cases], [sampling(c["params"]) for c in cases])
    assert tokens(requests) == [c["output_ids"] for c in cases]


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_every_step_commits_what_the_published_one_does(
    make_canvas: MakeCanvas, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and tokens of every step, not only what is left of them at the end."""
    found: list[tuple[list[int], list[int]]] = []

    def watched(request: CanvasRequest, *rest: Any) -> torch.Tensor:
        assert request.tokens is not None and request.masked is not None
        before = request.masked.clone()
        report = commit(request, *rest)
        where = (before & ~request.masked).nonzero()[:, 0] + len(request.prompt_ids)
        found.append((where.tolist(), request.tokens[where].tolist()))
        return report

    monkeypatch.setattr(canvas_engine, "commit", watched)
    monkeypatch.setattr(windows, "commit", watched)
    engine = make_canvas(folder)
    for case in description(folder)["decode"]:
        found.clear()
        run(engine, [case["prompt_ids"]], sampling(case["params"]))
        expected = [(step["positions"], step["tokens"]) for step in case["steps"] if step["positions"]]
        assert found == expected, case["name"]


def wrong(folder: str, make_canvas: MakeCanvas, change: str) -> list[str]:
    """Cases whose tokens change with a mistake in decoding."""
    engine = make_canvas(folder)
    if change == "shift":
        engine.model.config = replace(engine.model.config, shifted=not engine.model.config.shifted)
    different = []
    for case in description(folder)["decode"]:
        params = sampling(case["params"])
        if change == "other_cache":
            other = {"none": "dual", "prefix": "dual", "dual": "prefix"}[params.cache]
            params = replace(params, cache=other, block_length=params.block_length or 8)  # type: ignore[arg-type]
        if change == "other_rank":
            params = replace(
                params,
                algorithm="entropy" if params.algorithm == "maskgit_plus" else "maskgit_plus",
                confidence_threshold=None,
            )
        if change == "one_step_less":
            params = replace(params, denoising_steps=max(params.denoising_steps // 2, 2))
        (request,) = run(engine, [case["prompt_ids"]], params)
        if request.output_ids != case["output_ids"]:
            different.append(case["name"])
    return different


@pytest.mark.parametrize(
    ("folder", "change", "least"),
    [
        ("dream", "shift", 19),
        ("llada", "shift", 17),
        ("llada_moe", "shift", 6),
        ("llada", "other_cache", 13),
        ("dream", "other_cache", 14),
        ("dream", "other_rank", 10),
        ("llada", "one_step_less", 8),
        ("dream", "one_step_less", 10),
    ],
)
def test_a_wrong_loop_is_visible(make_canvas: MakeCanvas, folder: str, change: str, least: int) -> None:
    assert len(wrong(folder, make_canvas, change)) >= least

"""Shared by the tests of the quality suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.quality import cells
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.tasks.forms import TokensForm
from bench_longctx.tasks.haystack import Haystack
from herald.tokenizer import Tokenizer
from tests.engine.conftest import make_engine

TINY = Path(__file__).parents[3] / "herald" / "models" / "tiny_weights"

__all__ = ["make_engine"]


@pytest.fixture(scope="session")
def haystack() -> Haystack:
    return Haystack.load()


@pytest.fixture(scope="session")
def tokens() -> TokensForm:
    """Tokens of the bundled model's tokenizer, with its chat template."""
    return TokensForm(Tokenizer(TINY))


SMALL = ["--device", "cpu", "--lengths", "2048", "--budgets", "0.1", "--batch", "2"]


def fake_cell(job: Job, task: str, scores: list[float]) -> dict[str, Any]:
    cost = {
        "blocks": 10,
        "steps_per_block": 2.0,
        "forwards_per_block": 2.5,
        "selection_seconds_per_block": 0.001,
        "bytes_moved_per_block": 2e6,
        "exposed_share": 0.25,
    }
    right = sum(score == 1 for score in scores)
    return {
        **vars(job),
        "task": task,
        "score": sum(scores) / len(scores),
        "right": right,
        "of": len(scores),
        "seconds": 1.0,
        "scores": scores,
        "cost": cost,
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the cells that were run, with a stand-in for the engine."""
    keys: list[str] = []

    def run_job(job: Job, settings: Settings, tasks: list[str], threads: int, said: Any) -> Iterator[Any]:
        for task in tasks:
            keys.append(job.key(task))
            scores = [1.0] * 10 if job.method == "dense" else [1.0] * 4 + [0.0] * 6
            yield job.key(task), fake_cell(job, task, scores)

    monkeypatch.setattr(cells, "run_job", run_job)
    return keys

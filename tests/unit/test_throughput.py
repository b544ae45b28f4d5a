"""Benchmarks of speed as they are run, on tiny shapes: plans that end, and one that fails aloud."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench_longctx.throughput import decode, synthetic
from herald.config import OffloadConfig
from herald.engine.retriever import Retriever
from herald.errors import HeraldError

ROOT = Path(__file__).parents[2]


def test_every_measurement_is_made(tmp_path: Path) -> None:
    """Both engines and contexts, all batches; retrieval running, with its lanes only, and without any."""
    options = ["--suite", "decode,dense,prefill", "--tiny", "--blocks", "1"]
    command = [sys.executable, "-m", "bench_longctx.throughput", *options]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    suites = json.loads((tmp_path / "out.json").read_text())["suites"]
    assert {run["prefix"] for run in suites["dense"]["runs"]} == {1024, 2048}
    assert {run["tokens"] for run in suites["prefill"]["runs"]} == {1024, 2048}
    runs = suites["decode"]["runs"]
    assert {run["retrieval"] for run in runs} == {decode.FULL, decode.LANES_ONLY, decode.BARE}
    assert {run["prefix"] for run in runs} == {1024, 2048}
    assert all(run["tokens_per_second"] > 0 for run in runs)
    assert "tokens/s" in done.stdout


def test_experts_are_timed_and_tuned(tmp_path: Path) -> None:
    """Every tile that is tried runs, through descriptors too; in Triton's interpreter."""
    command = [sys.executable, "-m", "bench_longctx.kernels.bench_experts", "--tiny", "--tune"]
    subprocess.run([*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, check=True, timeout=240)
    report = json.loads((tmp_path / "out.json").read_text())
    assert {each["name"] for each in report["figures"]} == {"route_experts", "expert_mlp"}
    tried = [(each["product"], each["tile"]["descriptors"]) for each in report["variants"]]
    assert sorted(set(tried)) == [(name, flag) for name in ("down", "gate_up") for flag in (False, True)]


def test_the_long_context_alone(tmp_path: Path) -> None:
    options = ["--inside", "decode", "--tiny", "--blocks", "1", "--contexts", "long"]
    command = [sys.executable, "-m", "bench_longctx.throughput", *options]
    subprocess.run([*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, check=True, timeout=240)
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["prefix"], run["batch"], run["steps"]) for run in runs] == [
        (2048, 2, 20),
        (2048, 1, 20),
        (2048, 2, 8),
    ]


def test_a_request_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    model = synthetic.random_model("sdar-8b", 16, 4096, torch.device("cpu"), tiny=True)
    monkeypatch.setattr(synthetic.engine_module, "PrefillTask", synthetic.SyntheticPrefill)
    engine = synthetic.make_engine(model, OffloadConfig(kv_budget=0.1, num_threads=1), 1, 0.5)

    def fails(*args: object) -> None:
        raise ValueError("no rows today")

    monkeypatch.setattr(Retriever, "select", fails)
    try:
        with pytest.raises(HeraldError, match="no rows today"):
            decode.measure(engine, decode.Run(1024, 1, 4, 1))
    finally:
        engine.close()

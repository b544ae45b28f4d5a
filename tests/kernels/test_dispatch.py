"""Which implementation runs where, and that the package does without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

import herald_kernels
from herald_kernels import dispatch

BLOCK_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import herald_kernels
rows = torch.arange(6.0).reshape(3, 2)
herald_kernels.copy_rows(rows, torch.tensor([0]), rows, torch.tensor([2]))
assert rows.tolist() == [[4.0, 5.0], [2.0, 3.0], [4.0, 5.0]]
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERALD_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_triton_problem", lambda: "")


def test_every_operation_is_exported_with_both_implementations() -> None:
    for op in herald_kernels.OPS:
        assert callable(getattr(herald_kernels, op))
        assert callable(dispatch._load(op, "torch"))


@pytest.mark.parametrize("op", herald_kernels.OPS)
def test_auto_takes_triton_on_cuda_and_torch_elsewhere(op: str) -> None:
    assert herald_kernels.backend(op, "cuda") == herald_kernels.Backend("triton", "")
    assert herald_kernels.backend(op, "cpu") == herald_kernels.Backend("torch", "")
    assert herald_kernels.backend(op, "mps") == herald_kernels.Backend("torch", "")


def test_missing_triton_is_a_reason_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton_problem", lambda: "triton is not installed; pip install triton")
    chosen = herald_kernels.backend("commit", "cuda")
    assert chosen.name == "torch"
    assert "pip install triton" in chosen.reason
    monkeypatch.setenv("HERALD_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="pip install triton"):
        herald_kernels.backend("commit", "cuda")


def test_torch_can_be_forced_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERALD_KERNELS", "torch")
    chosen = herald_kernels.backend("commit", "cuda")
    assert chosen.name == "torch"
    assert "HERALD_KERNELS=torch" in chosen.reason


def test_triton_on_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERALD_KERNELS", "triton")
    chosen = herald_kernels.backend("commit", "cpu")
    assert chosen.name == "torch"
    assert "TRITON_INTERPRET=1" in chosen.reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert herald_kernels.backend("commit", "cpu") == herald_kernels.Backend("triton", "")


def test_unknown_names_are_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"nothing.*copy_rows"):
        herald_kernels.backend("nothing", "cpu")
    monkeypatch.setenv("HERALD_KERNELS", "fast")
    with pytest.raises(ValueError, match=r"fast.*auto, torch, triton"):
        herald_kernels.backend("commit", "cpu")


def test_works_without_triton() -> None:
    result = subprocess.run(
        [sys.executable, "-c", BLOCK_TRITON],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert result.returncode == 0, result.stderr

"""Where the kernels are tested: torch on the cpu, Triton in its interpreter, Triton on a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.support import EVERYWHERE, INTERPRETER, Target


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a target runs on each of them, unless it names fewer with `support.on`."""
    named = any("target" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "target" in metafunc.fixturenames and not named:
        metafunc.parametrize("target", EVERYWHERE, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Device, dtype and error bound of a test; the dispatch point is set to the implementation."""
    chosen: Target = request.param
    if chosen.backend == "triton":
        pytest.importorskip("triton")
    if chosen is INTERPRETER and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is chosen at import; run with TRITON_INTERPRET=1")
    monkeypatch.setenv("HERALD_KERNELS", chosen.backend)
    return chosen


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` returns holds NaN (integers: a huge number), so that an unwritten output shows."""
    empty: Callable[..., torch.Tensor] = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = empty(*args, **kwargs)
        return memory.fill_(float("nan") if memory.is_floating_point() else torch.iinfo(memory.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)

"""Which transfer a mode gives, and what the ones for CUDA find out before they start."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from herald.errors import InvalidOption
from herald.transfer import DeviceStreams, RowMove, ThreadTransfer, ZeroCopyTransfer, make_transfer
from herald.transfer.zero_copy import zero_copy_problem


def test_auto_on_the_cpu_is_a_thread() -> None:
    pool, arena = torch.randn(5, 4), torch.zeros(3, 4)
    transfer, why = make_transfer("auto", pool, arena, "cpu", 2)
    with transfer:
        assert isinstance(transfer, ThreadTransfer) and why == ""
        transfer.submit(RowMove(np.array([4]), np.array([2]))).wait_device()
    assert torch.equal(arena[2], pool[4])


@pytest.mark.parametrize("mode", ["zero_copy", "staged", "teleport"])
def test_other_modes_on_the_cpu_are_refused(mode: str) -> None:
    with pytest.raises(InvalidOption, match=f"{mode}.*use 'auto'"):
        make_transfer(mode, torch.zeros(1, 4), torch.zeros(1, 4), "cpu", 1)  # type: ignore[arg-type]


def test_zero_copy_says_why_it_cannot() -> None:
    assert "needs a CUDA device" in zero_copy_problem(torch.zeros(1, 4), torch.device("cpu"))
    with pytest.raises(InvalidOption, match="needs a CUDA device"):
        ZeroCopyTransfer(torch.zeros(1, 4), torch.zeros(1, 4))


def test_zero_copy_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "needs CuPy" in zero_copy_problem(torch.zeros(1, 4), torch.device("cuda"))


def test_streams_of_the_cpu_are_nothing() -> None:
    streams = DeviceStreams("cpu")
    assert streams.copy is None and streams.back is None
    with streams.on(streams.copy):
        pass

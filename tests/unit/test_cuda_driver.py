"""Graphs and streams of the driver: what fails half way is given back, and who is first makes the stream."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from herald import cuda_driver
from herald.cuda_driver import CudaDriver, exclusive_stream

DEVICE = torch.device("cuda", 0)


class Library:
    """The driver's functions; ``failing`` is one of them, and ``graphs`` those that nobody destroyed."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.graphs: set[int] = set()
        self.recording = False
        self.destroyed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> int:
        if name == "cuStreamBeginCapture_v2":
            self.recording = name != self.failing
        elif name == "cuStreamEndCapture":
            assert self.recording
            self.recording = False
            if name != self.failing:
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_void_p))[0] = 7
                self.graphs.add(7)
        elif name == "cuGraphInstantiateWithFlags":
            assert arguments[1].value in self.graphs
            if name != self.failing:
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 8
        elif name == "cuGraphDestroy":
            self.graphs.remove(arguments[0].value)
        else:
            self.destroyed.append(arguments[0].value)
        return 700 if name == self.failing else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    monkeypatch.setattr(cuda_driver, "exclusive_stream", lambda *_: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    driver = CudaDriver.__new__(CudaDriver)
    driver._device = DEVICE
    return driver


@pytest.mark.parametrize(
    "failing", ["", "cuStreamBeginCapture_v2", "work", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"]
)
def test_a_recording_that_fails_leaves_nothing(driver: CudaDriver, failing: str) -> None:
    library = Library(failing)
    driver._library = library  # type: ignore[assignment]

    def work() -> None:
        assert library.recording
        if failing == "work":
            raise ValueError("no such kernel")

    if failing:
        with pytest.raises(
            (RuntimeError, ValueError), match="no such kernel" if failing == "work" else failing
        ):
            driver.capture(work)
    else:
        assert driver.capture(work) == 8
    assert not library.graphs and not library.recording


def test_everything_is_released_whatever_fails(driver: CudaDriver) -> None:
    library = Library("cuGraphExecDestroy")
    driver._library = library  # type: ignore[assignment]
    driver.release([1, 2], [3, 4])
    assert library.destroyed == [1, 2, 3, 4]


def test_threads_that_ask_together_get_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        made = 0

        def cuStreamCreate(self, stream: Any, flags: int) -> int:
            time.sleep(0.02)
            Slow.made += 1
            ctypes.cast(stream, ctypes.POINTER(ctypes.c_void_p))[0] = Slow.made
            return 0

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _: Slow())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(exclusive_stream(DEVICE, "a test of threads")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(1, DEVICE)] * 4

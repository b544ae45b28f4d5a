"""Streams and events that look the same on the CPU, where work is finished when a call returns."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# A base event older than this is replaced: the two clocks drift, and event times are float32.
BASE_SECONDS = 30.0


class HostEvent:
    """A moment of the host, with the methods of `torch.cuda.Event` that this package uses."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a CUDA device current for the calling thread. Kernels are launched there, whatever they read."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Event after the work that was put on a device's current stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class _Current(AbstractContextManager[None]):
    """A device and one of its streams are current inside; like torch's own, in half the time."""

    def __init__(self, stream: Any, device: int) -> None:
        self._stream = stream
        self._device = device

    def __enter__(self) -> None:
        self._device_before = torch.cuda.current_device()
        self._stream_before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._stream_before)
        if self._device_before != self._device:
            torch.cuda.set_device(self._device_before)


class DeviceStreams:
    """The streams of a device that copy: ``copy``, ``back`` and ``load``.

    ``copy`` takes rows to the device, with high priority: its few blocks get the next free SM instead of
    waiting behind the compute stream's grids. ``back`` takes rows to the host, by the copy engine, so
    that neither direction queues behind the other. ``load`` takes whole pages to the device, behind which the
    few rows of a selection must not queue. On the CPU all are None, and `on` does nothing.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.copy: Any = None
        self.back: Any = None
        self.load: Any = None
        if self.is_cuda:
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self.copy = torch.cuda.Stream(self.device, priority=-1)
            self.back = torch.cuda.Stream(self.device)
            self.load = torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make the device and one of its streams current for the calling thread."""
        return _Current(stream, self.device.index) if self.is_cuda else nullcontext()


class DeviceClock:
    """Puts timed events of a device on the clock of `time.perf_counter`.

    One event is recorded on an idle stream and waited for, which ties the two clocks together to some
    microseconds. That happens when a time is asked for, never while work is issued, and serves what is issued
    in the `BASE_SECONDS` after it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # What was issued before a base and is asked about after it, needs the base before.
        self._bases: deque[tuple[Any, float]] = deque(maxlen=2)

    def span(self, start: Any, end: Any, issued: float) -> tuple[float, float]:
        """Times of two timed events that both have happened.

        Args:
            start: the earlier event.
            end: the later one.
            issued: `time.perf_counter` when they were about to be recorded.
        """
        seconds = start.elapsed_time(end) / 1e3
        # Only of two events in a known order is the elapsed time defined.
        for base, then in reversed(tuple(self._bases)):
            if then < issued < then + BASE_SECONDS:
                begin = then + base.elapsed_time(start) / 1e3
                return begin, begin + seconds
        event, now = self._record_base()
        if not self._bases or now > self._bases[-1][1] + BASE_SECONDS / 2:
            self._bases.append((event, now))
        begin = now - start.elapsed_time(event) / 1e3
        return begin, begin + seconds

    def _record_base(self) -> tuple[Any, float]:
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            event.record(self._stream)
            event.synchronize()
        return event, time.perf_counter()

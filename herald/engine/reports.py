"""What passes between host and device at a step: integers in, a report out, two events around it."""

from __future__ import annotations

import time

import numpy as np
import torch

from herald.transfer.streams import DeviceClock, HostEvent


class StepReport:
    """Page-locked memory and events of one step, used again by later ones.

    Args:
        device: of the steps.
        clock: turns its events into times; None on a CPU.
    """

    def __init__(self, device: torch.device, clock: DeviceClock | None) -> None:
        self.device = device
        self._clock = clock
        self._stream = torch.cuda.current_stream(device) if clock is not None else None
        # By size: steps of several shapes take turns, and page-locked memory is slow to come by.
        self._inputs: dict[int, tuple[torch.Tensor, np.ndarray]] = {}
        self._reports: dict[torch.Size, torch.Tensor] = {}
        self.inputs = torch.empty(0, dtype=torch.int64)
        self._report = torch.empty(0, 1, dtype=torch.int64)
        self._rows = 0
        self._issued = 0.0
        self._start = self._event()
        self._end = self._event()

    def begin(self, inputs: np.ndarray) -> None:
        """Take a step's integers (int64) and note when it starts."""
        if inputs.size not in self._inputs:
            buffer = self._buffer(inputs.size)
            self._inputs[inputs.size] = buffer, buffer.numpy()
        self.inputs, array = self._inputs[inputs.size]
        array[:] = inputs
        self._issued = time.perf_counter()
        self._start = self._record(self._start)

    def end(self, report: torch.Tensor | None, rows: int) -> None:
        """Bring a report [R, B + 1], of which the first ``rows`` count, to the host once the step is done."""
        self._rows = rows if report is not None else 0
        if report is not None and rows:
            if report.shape not in self._reports:
                self._reports[report.shape] = self._buffer(report.numel()).view(report.shape)
            self._report = self._reports[report.shape]
            self._report.copy_(report, non_blocking=True)
        self._end = self._record(self._end)

    def done(self) -> bool:
        """Whether the step has run. Never blocks."""
        return self._end.query()

    def wait(self) -> None:
        """Block until the step has run."""
        self._end.synchronize()

    def read(self) -> list[list[int]]:
        """The report's rows, once the step is done."""
        rows: list[list[int]] = self._report[: self._rows].tolist()
        return rows

    def span(self) -> tuple[float, float]:
        """When the step ran, on the clock of `time.perf_counter`."""
        if isinstance(self._start, HostEvent) and isinstance(self._end, HostEvent):
            return self._start.time, self._end.time
        assert self._clock is not None
        return self._clock.span(self._start, self._end, self._issued)

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _event(self) -> torch.cuda.Event | HostEvent:
        # A host that waits sleeps: the cores have rows to score meanwhile.
        return HostEvent() if self._clock is None else torch.cuda.Event(enable_timing=True, blocking=True)

    def _record(self, event: torch.cuda.Event | HostEvent) -> torch.cuda.Event | HostEvent:
        if isinstance(event, HostEvent):
            return HostEvent()
        event.record(self._stream)
        return event


class ReportPool:
    """Reports that no step is using.

    Args:
        device: of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = DeviceClock(device) if device.type == "cuda" else None
        self._free: list[StepReport] = []

    def take(self) -> StepReport:
        return self._free.pop() if self._free else StepReport(self._device, self._clock)

    def give_back(self, report: StepReport) -> None:
        """Its step is done and it was read."""
        self._free.append(report)

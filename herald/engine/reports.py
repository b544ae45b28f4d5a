"""What passes between host and device at a step: integers in, a report out, two events around it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from herald.transfer.streams import DeviceClock, HostEvent


class _Given:
    """Page-locked memory for the integers of steps of one shape, ``count`` of them before ``free_rows``."""

    def __init__(self, buffer: torch.Tensor, count: int) -> None:
        self.buffer = buffer
        self._array = buffer.numpy()
        self._array[count:] = -1
        self._count = self._used = count

    def fill(self, numbers: np.ndarray, free_rows: Sequence[np.ndarray]) -> None:
        array, at = self._array, self._count
        array[:at] = numbers
        for rows in free_rows:
            array[at : at + rows.size] = rows
            at += rows.size
        if at < self._used:
            array[at : self._used] = -1
        self._used = at


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
        # By shape: steps of several take turns, and page-locked memory is slow to come by.
        self._given: dict[tuple[int, int], _Given] = {}
        self._reports: dict[torch.Size, tuple[torch.Tensor, np.ndarray]] = {}
        self.inputs = torch.empty(0, dtype=torch.int64)
        self._report = np.empty((0, 1), dtype=np.int64)
        self._rows = 0
        self._issued = 0.0
        self._start = self._event()
        self._end = self._event()

    def begin(self, numbers: np.ndarray, free_rows: Sequence[np.ndarray] = (), room: int = 0) -> None:
        """Take a step's integers, of `StepInputs` in their order, and note when it starts.

        Args:
            numbers: int64, all but ``free_rows``.
            free_rows: int64 each, one behind the other.
            room: integers of ``free_rows`` in all; those that are not given become -1.
        """
        key = (numbers.size, room)
        if key not in self._given:
            self._given[key] = _Given(self._buffer(sum(key)), numbers.size)
        given = self._given[key]
        given.fill(numbers, free_rows)
        self.inputs = given.buffer
        self.begin_again()

    def begin_again(self) -> None:
        """Note when a step starts whose integers are those of the step before."""
        self._issued = time.perf_counter()
        self._start = self._record(self._start)

    def end(self, report: torch.Tensor | None, rows: int) -> None:
        """Bring a report [R, B + 1], of which the first ``rows`` count, to the host once the step is done."""
        self._rows = rows if report is not None else 0
        if report is not None and rows:
            pair = self._reports.get(report.shape)
            if pair is None:
                host = self._buffer(report.numel()).view(report.shape)
                pair = self._reports[report.shape] = host, host.numpy()
            pair[0].copy_(report, non_blocking=True)
            self._report = pair[1]
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

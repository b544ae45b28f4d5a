"""Steps that were launched and whose reports were not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from herald.decode import Take
from herald.engine.canvas.request import CanvasRequest
from herald.engine.reports import ReportPool, StepReport
from herald.engine.trace import ForwardPart, Trace

# Steps that may be under way where the host knows what they will take.
MAX_UNDER_WAY = 3


@dataclass(frozen=True)
class Part:
    """A request's part in a step.

    Attributes:
        block, step: what was denoised.
        take: what it was to take.
        counted: the request's state went on when it was launched; otherwise it waits for the report.
    """

    request: CanvasRequest
    block: int
    step: int
    take: Take
    counted: bool


@dataclass(frozen=True)
class Step:
    """A step that was launched.

    Attributes:
        report: a row for each part, see `commit`.
        traced: its span is noted when it is read.
    """

    parts: list[Part]
    report: StepReport
    traced: bool


class StepsUnderWay:
    """Reads reports in the order of their steps.

    Args:
        reports: takes reports back.
        trace: receives spans.
    """

    def __init__(self, reports: ReportPool, trace: Trace) -> None:
        self._reports = reports
        self._trace = trace
        self._steps: deque[Step] = deque()

    def launched(self, step: Step) -> None:
        """A step is under way. The state of requests goes on where what they lose is certain."""
        self._steps.append(step)
        for part in step.parts:
            if part.counted:
                part.request.state.took(part.take, part.take.look)

    def settle(self, everything: bool) -> Iterator[tuple[Part, int, list[int]]]:
        """Read the steps that have run; wait for those that may not stay under way, or for all.

        Yields:
            For each part its masks left (-1 after non-finite logits) and the tokens of its block.
        """
        while self._steps:
            step = self._steps[0]
            if not step.report.done():
                waits = everything or len(self._steps) >= MAX_UNDER_WAY
                if not waits and all(part.counted for part in self._steps[-1].parts):
                    return
                step.report.wait()
            self._steps.popleft()
            yield from self._read(step)

    def _read(self, step: Step) -> Iterator[tuple[Part, int, list[int]]]:
        rows = step.report.read()
        start, end = step.report.span()
        self._reports.give_back(step.report)
        if step.traced:
            parts = [ForwardPart(p.request.request_id, p.block, p.step, 1, False) for p in step.parts]
            self._trace.add_forward(start, end, parts)
        for part, (left, *tokens) in zip(step.parts, rows, strict=True):
            yield part, left, tokens


def part_of(request: CanvasRequest, take: Take) -> Part:
    """The request's part in the step that is launched now."""
    goes_on = take.is_certain and take.look < request.state.left
    return Part(request, request.block, request.state.step, take, goes_on)

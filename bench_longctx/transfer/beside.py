"""Rows moved while denoising steps run: what the steps lose, and how fast the rows come."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from bench_longctx.transfer.denoising_step import DenoisingStep
from bench_longctx.transfer.movers import Mover
from herald.transfer import Ticket

# Loads that wait behind the one under way, so that the copy stream never runs dry.
QUEUED = 3


@dataclass(frozen=True)
class Beside:
    """A step with rows moving beside it.

    Attributes:
        step_seconds: of a step meanwhile.
        gb_per_second: of rows meanwhile.
        slowdown: of the step, as a share of its time alone.
        seconds_per_gb: of denoising that a GB of rows costs; None where no row arrived meanwhile.
    """

    step_seconds: float
    gb_per_second: float
    slowdown: float
    seconds_per_gb: float | None


def run_beside(step: DenoisingStep, steps: int, alone: float, mover: Mover) -> Beside:
    """Run ``steps`` steps while ``mover`` is never idle.

    Args:
        step: the stand-in.
        steps: how many.
        alone: seconds of a step without the mover.
        mover: kept busy from before the first step until after the last.
    """
    tickets = [mover.start() for _ in range(QUEUED)]
    waiting = deque(tickets)
    time.sleep(2e-3)
    replays = step.start(steps)
    while not replays.done():
        while waiting and waiting[0].done():
            waiting.popleft()
        if len(waiting) < QUEUED:
            tickets.append(mover.start())
            waiting.append(tickets[-1])
        else:
            time.sleep(1e-4)
    start, end = replays.span()
    for ticket in tickets:
        ticket.wait_host()
    gigabytes = sum(_bytes_within(ticket, start, end) for ticket in tickets) / 1e9
    lost = (end - start) - steps * alone
    return Beside(
        step_seconds=(end - start) / steps,
        gb_per_second=gigabytes / (end - start),
        slowdown=lost / (steps * alone),
        seconds_per_gb=lost / gigabytes if gigabytes else None,
    )


def _bytes_within(ticket: Ticket, start: float, end: float) -> float:
    """Bytes of a transfer that fall between two times, as if it ran evenly."""
    span = ticket.span
    assert span is not None
    inside = max(0.0, min(end, span[1]) - max(start, span[0]))
    return ticket.bytes * inside / max(span[1] - span[0], 1e-9)

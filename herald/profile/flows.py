"""Which selection, which copy and which forward belong together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from herald.engine.trace import Span

# Events of a GPU come onto the host's clock with an error of some microseconds.
CLOCK_ERROR = 100e-6


@dataclass(frozen=True)
class Flow:
    """The way of a block's rows.

    Attributes:
        selection: chose them.
        transfer: brought those that were not resident; None when all were.
        forward: the first forward of the block that attended to them.
    """

    selection: Span
    transfer: Span | None
    forward: Span


def flows(spans: Iterable[Span]) -> list[Flow]:
    """Flows of every (request, block) in order of time. A selection that no forward used has none."""
    by_block: dict[tuple[str, int], dict[str, list[Span]]] = {}
    for span in sorted(spans, key=lambda each: each.start):
        if span.block >= 0:
            kinds = by_block.setdefault((span.request_id, span.block), {})
            kinds.setdefault(span.kind, []).append(span)
    found = []
    for kinds in by_block.values():
        for selection in kinds.get("selection", []):
            transfer = _first_after(kinds.get("transfer", []), selection)
            steps = [span for span in kinds.get("forward", []) if span.step >= 0]
            forward = _first_after(steps, transfer or selection)
            if forward is not None:
                found.append(Flow(selection, transfer, forward))
    return sorted(found, key=lambda flow: flow.selection.start)


def _first_after(spans: list[Span], earlier: Span) -> Span | None:
    """The first of ``spans`` (ascending) that starts once ``earlier`` has ended."""
    return next((span for span in spans if span.start >= earlier.end - CLOCK_ERROR), None)

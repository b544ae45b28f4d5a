"""Spans sorted onto tracks: the slices that the trace file and the picture show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from herald.engine.trace import Span

COMPUTE, LOOKAHEAD, SELECTION, GATHER = "compute", "look-ahead", "CPU selection", "gather"
WAITS, WRITE_BACK, INDEX = "waits", "write-back", "CPU index"
# As they stand below each other.
TRACKS = (COMPUTE, LOOKAHEAD, SELECTION, GATHER, WAITS, WRITE_BACK, INDEX)

_TRACK_OF = {
    "prefill": COMPUTE,
    "selection": SELECTION,
    "transfer": GATHER,
    "wait": WAITS,
    "write_back": WRITE_BACK,
    "index": INDEX,
}


@dataclass(frozen=True)
class Slice:
    """A bar on a track.

    Attributes:
        block: the block it was for; of a forward of several requests, the first one's.
        spans: the span it stands for, or those of all requests that share a forward.
    """

    track: str
    name: str
    block: int
    spans: tuple[Span, ...]

    @property
    def start(self) -> float:
        return self.spans[0].start

    @property
    def end(self) -> float:
        return self.spans[0].end


def forwards(spans: Iterable[Span]) -> list[tuple[Span, ...]]:
    """Each forward once, in order of time: the spans of the requests that share it."""
    together: dict[tuple[float, float], list[Span]] = {}
    for span in spans:
        if span.kind == "forward":
            together.setdefault((span.start, span.end), []).append(span)
    return [tuple(together[times]) for times in sorted(together)]


def slices(spans: Iterable[Span]) -> list[Slice]:
    """Every bar of every track, by start, the longer of two that start together first.

    A forward that carried look-ahead lanes has a bar on two tracks.
    """
    spans = list(spans)
    bars = [
        Slice(_TRACK_OF[span.kind], _name(span), span.block, (span,))
        for span in spans
        if span.kind != "forward"
    ]
    for shared in forwards(spans):
        bars.append(Slice(COMPUTE, _forward_name(shared), shared[0].block, shared))
        ahead = tuple(span for span in shared if span.lookahead)
        if ahead:
            bars.append(Slice(LOOKAHEAD, _lookahead_name(ahead), ahead[0].block + 1, ahead))
    return sorted(bars, key=lambda bar: (bar.start, -bar.end))


def _name(span: Span) -> str:
    kind = span.kind.replace("_", "-")
    if span.block >= 0:
        return f"{kind}, block {span.block}"
    return kind if span.kind == "prefill" else f"{kind}, prompt"


def _forward_name(shared: tuple[Span, ...]) -> str:
    if len(shared) > 1:
        return f"step of {len(shared)} requests"
    (span,) = shared
    if span.step < 0:
        return f"boundary forward, block {span.block}"
    return f"step {span.step}, block {span.block}"


def _lookahead_name(ahead: tuple[Span, ...]) -> str:
    if len(ahead) > 1:
        return f"look-ahead of {len(ahead)} requests"
    return f"look-ahead, block {ahead[0].block + 1}"

"""When each part of the machine worked: spans on one clock, kept while an engine runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from herald.transfer.streams import DeviceClock

SpanKind = Literal["prefill", "forward", "selection", "transfer", "write_back", "index", "wait"]


@dataclass(frozen=True)
class Span:
    """One piece of work. ``start`` and ``end`` in seconds on `time.perf_counter`'s clock.

    Attributes:
        block: the request's block that it was for, -1 for none (prefill).
        step: of a forward, the block's denoising step; -1 for a forward that denoises nothing. The requests
            that share a forward have a span each, with the same ``start`` and ``end``.
        lanes: of a forward, the request's lanes in it.
        lookahead: of a forward, whether look-ahead lanes for the next block were among them.
        rows: rows chosen (selection) or moved (transfer).
        bytes: bytes of the index scanned (selection), or copied (transfer, write-back).
    """

    kind: SpanKind
    start: float
    end: float
    request_id: str = ""
    block: int = -1
    step: int = -1
    lanes: int = 0
    lookahead: bool = False
    rows: int = 0
    bytes: int = 0


class ForwardPart(NamedTuple):
    """What a request had in a forward; see `Span`."""

    request_id: str
    block: int
    step: int
    lanes: int
    lookahead: bool


class _Forward(NamedTuple):
    """A forward whose spans, one for each request, are made when somebody asks for them."""

    start: float
    end: float
    parts: list[ForwardPart]

    def spans(self) -> list[Span]:
        return [
            Span("forward", self.start, self.end, p.request_id, p.block, p.step, p.lanes, p.lookahead)
            for p in self.parts
        ]


class _DeviceSpan(NamedTuple):
    kind: SpanKind
    request_id: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    issued: float


class Trace:
    """Spans of an engine, newest last, at most ``capacity`` of them. Thread-safe.

    Args:
        device: whose work `device_span` times; None for work of the host alone.
    """

    def __init__(self, capacity: int = 100_000, device: torch.device | None = None) -> None:
        self.capacity = capacity
        self._kept: list[Span | _Forward] = []
        self._count = 0
        self._lock = threading.Lock()
        self._clock = DeviceClock(device) if device is not None and device.type == "cuda" else None
        self._pending: deque[_DeviceSpan] = deque()

    def add(self, span: Span) -> None:
        self._keep(span, 1)

    def add_forward(self, start: float, end: float, parts: list[ForwardPart]) -> None:
        """A span for each request of a forward."""
        self._keep(_Forward(start, end, parts), len(parts))

    def _keep(self, entry: Span | _Forward, spans: int) -> None:
        with self._lock:
            self._kept.append(entry)
            self._count += spans
            if self._count > self.capacity:
                self._forget(self._count - self.capacity + self.capacity // 10)

    def _forget(self, spans: int) -> None:
        """Drop the oldest entries that hold as many spans, but for the newest entry."""
        entries = 0
        while spans > 0 and entries < len(self._kept) - 1:
            entry = self._kept[entries]
            size = len(entry.parts) if isinstance(entry, _Forward) else 1
            self._count -= size
            spans -= size
            entries += 1
        del self._kept[:entries]

    @contextmanager
    def span(self, kind: SpanKind, request_id: str = "", block: int = -1) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(kind, start, time.perf_counter(), request_id, block))

    @contextmanager
    def device_span(self, kind: SpanKind, request_id: str) -> Iterator[None]:
        """A span of what the body puts on the current stream, timed by events on CUDA."""
        if self._clock is None:
            with self.span(kind, request_id):
                yield
            return
        issued = time.perf_counter()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        try:
            yield
        finally:
            end.record()
            self._pending.append(_DeviceSpan(kind, request_id, start, end, issued))
            self._settle()

    def spans(self) -> list[Span]:
        """All spans so far; of the device's, those that have ended."""
        self._settle()
        with self._lock:
            kept = list(self._kept)
        spans: list[Span] = []
        for entry in kept:
            if isinstance(entry, _Forward):
                spans += entry.spans()
            else:
                spans.append(entry)
        return spans

    def clear(self) -> None:
        self._pending.clear()
        with self._lock:
            self._kept.clear()
            self._count = 0

    def _settle(self) -> None:
        """Turn the events that have happened into spans."""
        while self._clock is not None and self._pending and self._pending[0].end.query():
            span = self._pending.popleft()
            times = self._clock.span(span.start, span.end, span.issued)
            self.add(Span(span.kind, *times, span.request_id))


def overlap_seconds(spans: list[Span], kinds: set[str], against: str = "forward") -> float:
    """Seconds in which a span of ``kinds`` and a span of kind ``against`` ran at the same time."""
    base = merged([(s.start, s.end) for s in spans if s.kind == against])
    other = merged([(s.start, s.end) for s in spans if s.kind in kinds])
    total, at = 0.0, 0
    for start, end in other:
        while at < len(base) and base[at][1] <= start:
            at += 1
        for begin, stop in base[at:]:
            if begin >= end:
                break
            total += min(end, stop) - max(start, begin)
    return total


def busy_seconds(spans: list[Span], kinds: set[str]) -> float:
    """Seconds in which at least one span of ``kinds`` ran."""
    return sum(end - start for start, end in merged([(s.start, s.end) for s in spans if s.kind in kinds]))


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, ascending."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found

"""When each part of the machine worked: spans on one clock, kept while an engine runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

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


class Trace:
    """Spans of an engine, newest last, at most ``capacity`` of them. Thread-safe."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        with self._lock:
            if len(self._spans) >= self.capacity:
                del self._spans[: self.capacity // 10]
            self._spans.append(span)

    @contextmanager
    def span(self, kind: SpanKind, request_id: str = "", block: int = -1) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(kind, start, time.perf_counter(), request_id, block))

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def clear(self) -> None:
        with self._lock:
            self._spans.clear()


def overlap_seconds(spans: list[Span], kinds: set[str], against: str = "forward") -> float:
    """Seconds in which a span of ``kinds`` and a span of kind ``against`` ran at the same time."""
    base = _union([(s.start, s.end) for s in spans if s.kind == against])
    other = _union([(s.start, s.end) for s in spans if s.kind in kinds])
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
    return sum(end - start for start, end in _union([(s.start, s.end) for s in spans if s.kind in kinds]))


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged

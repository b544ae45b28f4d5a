"""The trace file: Chrome's trace-event format, which https://ui.perfetto.dev and chrome://tracing open.

Kinds of events: "M" names a process or a track, "X" is a slice, "s", "t" and "f" are the begin, the middle
and the end of an arrow. Times are in microseconds from the first span.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from herald.engine.trace import Span
from herald.profile.flows import Flow, flows
from herald.profile.tracks import COMPUTE, GATHER, SELECTION, TRACKS, Slice, slices

PROCESS = 1

Event = dict[str, Any]
Row = tuple[str, int]  # a track has one row; more where two of its slices overlap


def write_trace(path: Path, spans: Iterable[Span], about: dict[str, Any]) -> None:
    """Write the spans to a gzipped JSON file.

    Args:
        about: what the run was, kept in the file.
    """
    content = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms", "otherData": about}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file)


def trace_events(spans: Iterable[Span]) -> list[Event]:
    """Events in the order of the file: names, then slices and arrows by time."""
    spans = list(spans)
    bars = slices(spans)
    rows = assign_rows(bars)
    order = sorted(set(rows), key=lambda row: (TRACKS.index(row[0]), row[1]))
    thread = {row: number for number, row in enumerate(order, 1)}
    origin = bars[0].start if bars else 0.0
    events = []
    threads_of: dict[tuple[str, Span], int] = {}
    for bar, row in zip(bars, rows, strict=True):
        events.append(_slice_event(bar, thread[row], origin))
        threads_of |= {(bar.track, span): thread[row] for span in bar.spans}
    for number, flow in enumerate(flows(spans), 1):
        events += _arrow(flow, number, threads_of, origin)
    events.sort(key=lambda event: event["ts"])  # stable: a slice stands before an arrow that begins with it
    return _names(thread) + events


def assign_rows(bars: Iterable[Slice]) -> list[Row]:
    """Row of each bar (by start): the first of its track that is free by then.

    Viewers drop slices that overlap. Two of a track do so only where clocks disagree by microseconds.
    """
    free_at: dict[str, list[float]] = {}
    rows = []
    for bar in bars:
        ends = free_at.setdefault(bar.track, [])
        row = next((i for i, end in enumerate(ends) if end <= bar.start), len(ends))
        ends[row : row + 1] = [bar.end]
        rows.append((bar.track, row))
    return rows


def _names(thread: dict[Row, int]) -> list[Event]:
    common: Event = {"ph": "M", "ts": 0, "pid": PROCESS}
    events = [{**common, "name": "process_name", "tid": 0, "args": {"name": "herald"}}]
    for (track, row), number in thread.items():
        name = f"{track} ({row + 1})" if row else track
        events.append({**common, "name": "thread_name", "tid": number, "args": {"name": name}})
        events.append({**common, "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}})
    return events


def _slice_event(bar: Slice, thread: int, origin: float) -> Event:
    begin, end = _microseconds(bar.start - origin), _microseconds(bar.end - origin)
    return {
        "ph": "X",
        "name": bar.name,
        "cat": bar.spans[0].kind,
        "ts": begin,
        "dur": round(end - begin, 3),
        "pid": PROCESS,
        "tid": thread,
        "args": _arguments(bar),
    }


def _arguments(bar: Slice) -> dict[str, Any]:
    """What a viewer shows of a slice; what does not apply to its kind is left out."""
    kept: dict[str, Any] = {"request": ", ".join(span.request_id for span in bar.spans)}
    if len(bar.spans) > 1:
        kept["blocks"] = [span.block for span in bar.spans]
        kept["steps"] = [span.step for span in bar.spans]
    for field in ("lanes", "rows", "bytes"):
        total = sum(getattr(span, field) for span in bar.spans)
        if total:
            kept[field] = total
    return kept


def _arrow(flow: Flow, number: int, threads_of: dict[tuple[str, Span], int], origin: float) -> list[Event]:
    """The arrow's events, each in the middle of the slice that it is tied to."""
    stops = [("s", SELECTION, flow.selection), ("f", COMPUTE, flow.forward)]
    if flow.transfer is not None:
        stops.insert(1, ("t", GATHER, flow.transfer))
    return [
        {
            "ph": phase,
            "name": "rows of a block",
            "cat": "flow",
            "id": number,
            "ts": _microseconds((span.start + span.end) / 2 - origin),
            "pid": PROCESS,
            "tid": threads_of[track, span],
            **({"bp": "e"} if phase == "f" else {}),  # ends in the slice around it, not at the next one
        }
        for phase, track, span in stops
    ]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

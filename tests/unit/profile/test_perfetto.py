from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from herald.engine.trace import Span
from herald.profile.perfetto import trace_events, write_trace
from tests.support.trace_file import check_trace, slice_around


def test_a_run_is_a_valid_trace(spans: list[Span]) -> None:
    random.Random(0).shuffle(spans)  # threads add theirs when they are done
    events = trace_events(spans)
    check_trace(events)
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == ["compute", "look-ahead", "CPU selection", "gather", "waits", "write-back", "CPU index"]
    count = {phase: sum(event["ph"] == phase for event in events) for phase in "Xstf"}
    # 9 forwards of which 3 look ahead; the selection for block 8 was never used.
    assert count == {"X": len(spans) + 3, "s": 2, "t": 2, "f": 2}
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end == pytest.approx(11.25e6)


def test_an_arrow_ends_at_the_first_step_of_its_block(spans: list[Span]) -> None:
    slices = [event for event in trace_events(spans) if event["ph"] == "X"]
    ends = [event for event in trace_events(spans) if event["ph"] == "f"]
    assert [slice_around(event, slices)["name"] for event in ends] == ["step 0, block 6", "step 0, block 7"]


def test_no_copy_no_middle() -> None:
    """A selection whose rows are all resident, made at a boundary: its own forward is not the user."""
    events = trace_events(
        [
            Span("wait", 0.0, 2.0, "a", 3),
            Span("forward", 0.0, 1.0, "a", 3, lanes=2),
            Span("selection", 1.0, 2.0, "a", 3, rows=1),
            Span("forward", 2.0, 3.0, "a", 3, 0, lanes=2),
        ]
    )
    check_trace(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["ph"] for event in events if event["ph"] in "stf"] == ["s", "f"]
    assert slice_around(events[-1], slices)["name"] == "step 0, block 3"
    assert "boundary forward, block 3" in {event["name"] for event in slices}


def test_requests_that_share_a_forward_share_a_slice() -> None:
    together = [Span("forward", 0.0, 1.0, name, 4, step, lanes=1) for name, step in (("a", 1), ("b", 2))]
    events = trace_events([*together, Span("forward", 1.0, 2.0, "a", 4, 2, lanes=1)])
    check_trace(events)
    shared, alone = (event for event in events if event["ph"] == "X")
    assert shared["args"] == {"request": "a, b", "blocks": [4, 4], "steps": [1, 2], "lanes": 2}
    assert alone["name"] == "step 2, block 4"


def test_slices_that_overlap_get_rows_of_their_own() -> None:
    overlapping = [Span("transfer", i * 0.9, i * 0.9 + 1.0, "a", i, bytes=1) for i in range(4)]
    events = trace_events(overlapping)
    check_trace(events)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["gather", "gather (2)"]


def test_nothing_recorded() -> None:
    assert [event["name"] for event in trace_events([])] == ["process_name"]


def test_the_file_is_gzipped_json(spans: list[Span], tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write_trace(path, spans, {"model": "x"})
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    assert content["traceEvents"] == trace_events(spans)
    assert content["otherData"] == {"model": "x"}

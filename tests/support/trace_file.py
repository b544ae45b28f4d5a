"""What makes a trace-event file valid."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Event = dict[str, Any]


def check_trace(events: list[Event]) -> None:
    """What every viewer needs: complete events, slices that nest, arrows that hold on to slices."""
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys() and event["ts"] >= 0
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in slices} == named.keys()
    for thread in named:
        _check_nesting([event for event in slices if event["tid"] == thread])
    arrows: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    for arrow in arrows.values():
        assert "".join(event["ph"] for event in arrow) in ("sf", "stf")  # in the order of the file
        assert [event["ts"] for event in arrow] == sorted(event["ts"] for event in arrow)
        held = [slice_around(event, slices) for event in arrow]
        expected = ["selection", "forward"] if len(arrow) == 2 else ["selection", "transfer", "forward"]
        assert [each["cat"] for each in held] == expected
        for before, after in pairwise(held):
            assert before["ts"] + before["dur"] <= after["ts"]


def _check_nesting(slices: list[Event]) -> None:
    ends: list[float] = []
    for event in slices:  # by ts: the file's order
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 1e-6, f"{event} overlaps the slice before it"
        ends.append(end)


def slice_around(arrow: Event, slices: list[Event]) -> Event:
    """The slice that an arrow's event is tied to."""
    (found,) = [
        each
        for each in slices
        if each["tid"] == arrow["tid"] and each["ts"] <= arrow["ts"] <= each["ts"] + each["dur"]
    ]
    return found

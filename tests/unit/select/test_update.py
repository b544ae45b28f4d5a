"""Plans of updates: native and numba against the plain reference, and what must hold after one is applied."""

from __future__ import annotations

import functools
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from herald.errors import ResidentSetTooSmall, UsageError
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.kvstore.native import find_native
from herald.select import Selector, SlotGeometry
from herald.select.reference import plan_reference

BACKENDS = [
    "numba",
    pytest.param(
        "native", marks=pytest.mark.skipif(find_native().module is None, reason=find_native().reason)
    ),
]
LAYERS, HEADS, PAGE, PAGES = 2, 2, 4, 16
LIMIT = PAGE * PAGES


@functools.cache
def selector(backend: str, threads: int = 1) -> Selector:
    pool = HostPool(RowLayout(LAYERS, HEADS, 8, PAGE, torch.float32), PAGES + 2, pin=False)
    return Selector(pool, KeyIndex(pool, 8), num_threads=threads, backend=backend)  # type: ignore[arg-type]


def check(backend: str, threads: int, *arguments: object) -> np.ndarray:
    """Plan and compare with the reference; returns the slots afterwards."""
    made = selector(backend, threads)
    plan = made.plan_update(*arguments)  # type: ignore[arg-type]
    wanted = plan_reference(made.pool, *arguments)  # type: ignore[arg-type]
    for name, got, expected in zip(plan._fields, plan, wanted):
        assert got.dtype == expected.dtype, name
        np.testing.assert_array_equal(got, expected, err_msg=name)
    assert plan.arrivals == len(plan.src_rows) == plan.counts.sum()
    return plan.positions


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_chain_of_updates(backend: str, threads: int, data: st.DataObject) -> None:
    """Blocks follow each other as in decoding: the set grows, the window moves, own rows join."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    block, sinks = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(0, 3))
    window = data.draw(st.integers(block, 8))
    move_all = data.draw(st.booleans())
    pages = rng.permutation(PAGES + 2)[:PAGES].astype(np.int32)
    num_slots = data.draw(st.integers(sinks + window + block, 40))
    geometry = SlotGeometry(num_slots * 3, data.draw(st.integers(0, num_slots)), num_slots, 2 * LIMIT)
    slots = np.full((LAYERS, HEADS, num_slots), -1, dtype=np.int32)
    length, prefix = 0, sinks + window + block
    while prefix <= LIMIT:
        own = block if length else 0
        last, upto = prefix - window, prefix - own
        last = min(last, upto)
        first = min(sinks, last)
        rest = first + upto - last + own
        k = min(last - first, num_slots - rest, max(0, length - rest) + data.draw(st.integers(0, 4)))
        if rest + k < length:
            break
        chosen = np.array([np.sort(rng.permutation(last - first)[:k]) for _ in range(LAYERS * HEADS)])
        selected = (chosen + first).reshape(LAYERS, HEADS, k).astype(np.int32)
        slots = check(
            *(backend, threads, slots, length, selected, first, last, upto, pages, own, move_all, geometry)
        )
        length = rest + k
        # Without a hole: the first `length` slots hold exactly sinks, selection, window and own rows.
        for at in np.ndindex(LAYERS, HEADS):
            expected = {*range(first), *selected[at].tolist(), *range(last, prefix)}
            assert sorted(slots[at][:length].tolist()) == sorted(expected)
        prefix += data.draw(st.integers(1, 3)) * block


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_empty_or_doubled_or_beyond(backend: str) -> None:
    slots = np.array([5, 5, -1, 63, 9, 1, -7, 8], dtype=np.int32)
    slots = np.broadcast_to(slots, (LAYERS, HEADS, 8))
    selected = np.broadcast_to(np.array([5, 7], dtype=np.int32), (LAYERS, HEADS, 2))
    pages = np.arange(PAGES, dtype=np.int32)
    for move_all in (False, True):
        check(backend, 1, slots, 8, selected, 2, 8, 10, pages, 2, move_all, SlotGeometry(30, 3, 8, 9))


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_example(backend: str) -> None:
    held = np.array([[[0, 10, 12, 14, 20, 21]] * HEADS] * LAYERS, dtype=np.int32)
    selected = np.array([[[11, 12]] * HEADS] * LAYERS, dtype=np.int32)
    pages = np.arange(PAGES, dtype=np.int32)
    plan = selector(backend).plan_update(
        held, 4, selected, 1, 20, 21, pages, 2, False, SlotGeometry(100, 50, 6, 7)
    )
    assert plan.counts.tolist() == [[2, 2], [2, 2]]
    assert plan.positions[0, 0].tolist() == [0, 11, 12, 20, 21, 22]
    assert plan.slot_rows[:2].tolist() == [51, 53]
    assert plan.staging_rows[2:4].tolist() == [100 + 50 + 6, 100 + 50 + 7]
    assert plan.free_rows[2:4].tolist() == [154, 155]
    assert plan.src_rows[:2].tolist() == selector(backend).pool.row_ids(0, 0, pages, [11, 20]).tolist()
    assert held[0, 0].tolist() == [0, 10, 12, 14, 20, 21], "the argument is not written to"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_update(backend: str) -> None:
    held = np.full((LAYERS, HEADS, 3), -1, dtype=np.int32)
    nothing = np.empty((LAYERS, HEADS, 0), dtype=np.int32)
    pages = np.arange(1, dtype=np.int32)
    plan = selector(backend).plan_update(held, 0, nothing, 0, 0, 0, pages, 0, False, SlotGeometry(3, 0, 3, 0))
    assert plan.arrivals == 0
    assert plan.free_rows.shape == (0,)
    assert np.array_equal(plan.positions, held)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_slots": 5}, UsageError, r"use \(2, 2, 5\)"),
        ({"selected": np.zeros((2, 1, 2), np.int32)}, UsageError, "selected of shape"),
        ({"upto": 65}, UsageError, "use 0 to 64"),
        ({"last": 1}, UsageError, "not ascending in the pages"),
        ({"pages": np.full(16, 18, np.int32)}, UsageError, "use 0 to 17"),
        ({"length": 7}, UsageError, "use 0 to 6"),
        ({"own": -1}, UsageError, "own_rows=-1"),
        ({"own": 3}, ResidentSetTooSmall, "at most 3 rows"),
        ({"own": 0, "length": 6}, UsageError, "at least 6 rows"),
        ({"staging": 1}, ResidentSetTooSmall, "4 rows arrive for 1 staging rows"),
        ({"selected": np.full((2, 2, 2), 11, np.int32)}, UsageError, "positions 2 to 19, each once"),
        ({"selected": np.array([[[1, 12]] * 2] * 2, np.int32)}, UsageError, "each once"),
        ({"selected": np.array([[[12, 20]] * 2] * 2, np.int32)}, UsageError, "each once"),
        ({"selected": np.array([[[12, -1]] * 2] * 2, np.int32)}, UsageError, "each once"),
    ],
)
def test_refusals_name_what_works(backend: str, change: dict, error: type[Exception], message: str) -> None:
    case: dict = {
        "held": np.array([[[0, 1, 12, 14, 0, 0]] * 2] * 2, dtype=np.int32),
        "length": 4,
        "selected": np.array([[[11, 12]] * 2] * 2, dtype=np.int32),
        "first": 2,
        "last": 20,
        "upto": 20,
        "pages": np.arange(16, dtype=np.int32),
        "own": 2,
        "num_slots": 6,
        "staging": 9,
        **change,
    }
    if "staging" in change:
        case["held"] = np.full((2, 2, 6), 50, dtype=np.int32)
    geometry = SlotGeometry(20, 0, case.pop("num_slots"), case.pop("staging"))
    with pytest.raises(error, match=message):
        selector(backend).plan_update(*case.values(), False, geometry)
    # An error leaves nothing behind: the next plan is right.
    held, good = np.full((2, 2, 6), -1, np.int32), np.array([[[11, 12]] * 2] * 2, np.int32)
    check(
        backend,
        1,
        held,
        0,
        good,
        2,
        20,
        20,
        np.arange(16, dtype=np.int32),
        2,
        False,
        SlotGeometry(9, 0, 6, 9),
    )


def test_a_plan_does_not_wait_for_a_scan() -> None:
    """The rows of one request are planned while every thread of the selection scans for another."""
    pool = HostPool(RowLayout(LAYERS, HEADS, 8, PAGE, torch.float32), PAGES + 2, pin=False)
    with closing(Selector(pool, KeyIndex(pool, 8), num_threads=2, backend="numba")) as made:
        assert made._executor is not None
        scan_ends = threading.Event()
        scans = [made._executor.submit(scan_ends.wait, 30) for _ in range(2)]
        held = np.full((LAYERS, HEADS, 3), -1, dtype=np.int32)
        nothing, pages = np.zeros((LAYERS, HEADS, 0), dtype=np.int32), np.zeros(1, dtype=np.int32)
        made.plan_update(held, 0, nothing, 0, 0, 0, pages, 0, False, SlotGeometry(3, 0, 3, 0))
        assert not any(scan.done() for scan in scans)
        scan_ends.set()

"""Differences of resident sets: what must hold after any change is applied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald.errors import ResidentSetTooSmall, UsageError
from herald.select import difference


def check_and_apply(slots: np.ndarray, length: int, target: np.ndarray, num_free: int) -> np.ndarray:
    """Apply a difference to a copy of the slots; every promise of the contract is asserted on the way."""
    positions, places, counts, free = difference(slots, length, target, num_free)
    after = slots.copy()
    most = counts.max() if counts.size else 0
    assert positions.shape == places.shape == (*target.shape[:2], most)
    assert free.shape == (*target.shape[:2], num_free)
    for at in np.ndindex(*target.shape[:2]):
        n = counts[at]
        assert (positions[at][n:] == -1).all()
        assert (places[at][n:] == -1).all()
        arriving, to = positions[at][:n], places[at][:n]
        assert (np.diff(arriving) > 0).all()
        assert np.isin(arriving, target[at]).all()
        written = np.concatenate([to, free[at]])
        # Distinct, handed out in order, and nothing is written over a row that stays.
        assert (np.diff(written) > 0).all()
        assert not np.isin(slots[at][written[written < length]], np.setdiff1d(target[at], arriving)).any()
        after[at][to] = arriving
        after[at][free[at]] = -5
        now = after[at][: target.shape[2] + num_free]
        assert sorted(now[now != -5].tolist()) == target[at].tolist()
        assert (now == -5).sum() == num_free
    return after


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chain_of_selections(data: st.DataObject) -> None:
    layers, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    block = data.draw(st.integers(0, 3))
    num_slots = data.draw(st.integers(block + 1, 16))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    slots = np.full((layers, heads, num_slots), -9, dtype=np.int32)
    length, prefix = 0, num_slots
    for _ in range(4):
        wanted = data.draw(st.integers(max(0, length - block), num_slots - block))
        # A prefix of exactly `wanted` rows is the full budget: every row is chosen.
        prefix = max(wanted, data.draw(st.sampled_from([wanted, prefix, 2 * prefix])))
        target = np.array(
            [[np.sort(rng.permutation(prefix)[:wanted]) for _ in range(heads)] for _ in range(layers)]
        ).astype(np.int32)
        slots = check_and_apply(slots, length, target.reshape(layers, heads, wanted), block)
        length = wanted + block


def test_full_budget_grows_without_moving_a_row() -> None:
    slots = np.full((1, 1, 12), -1, dtype=np.int32)
    slots[0, 0, :4] = [0, 1, 2, 3]
    for length in (4, 8):
        target = np.arange(length, dtype=np.int32)[None, None]
        positions, places, counts, free = difference(slots, length, target, 4)
        assert counts.sum() == 0
        assert positions.shape == places.shape == (1, 1, 0)
        assert free[0, 0].tolist() == list(range(length, length + 4))
        slots[0, 0, length : length + 4] = np.arange(length, length + 4)


def test_worked_example() -> None:
    slots = np.array([[[10, 11, 12, 13, 14, 99, 99, 99]]], dtype=np.int32)
    target = np.array([[[3, 11, 14, 20]]], dtype=np.int32)
    got = difference(slots, 5, target, 3)
    assert got.arrival_positions.tolist() == [[[3, 20]]]
    assert got.arrival_slots.tolist() == [[[0, 2]]]
    assert got.arrival_count.tolist() == [[2]]
    assert got.free_slots.tolist() == [[[3, 5, 6]]]


def test_heads_differ_and_are_padded() -> None:
    slots = np.array([[[1, 2, 3], [1, 2, 9]]], dtype=np.int32)
    target = np.array([[[1, 2, 3], [7, 8, 9]]], dtype=np.int32)
    got = difference(slots, 3, target, 0)
    assert got.arrival_count.tolist() == [[0, 2]]
    assert got.arrival_positions.tolist() == [[[-1, -1], [7, 8]]]
    assert got.arrival_slots.tolist() == [[[-1, -1], [0, 1]]]
    assert got.free_slots.shape == (1, 2, 0)


def test_a_row_that_is_resident_twice_stays_once() -> None:
    slots = np.array([[[5, 5, -1, 6]]], dtype=np.int32)
    got = difference(slots, 4, np.array([[[5, 6]]], dtype=np.int32), 2)
    assert got.arrival_count.tolist() == [[0]]
    assert got.free_slots.tolist() == [[[1, 2]]]


def test_refusals_name_what_works() -> None:
    slots = np.zeros((1, 1, 4), dtype=np.int32)
    target = np.arange(3, dtype=np.int32)[None, None]
    with pytest.raises(ResidentSetTooSmall, match="at most 2 rows"):
        difference(slots, 0, target, 2)
    with pytest.raises(UsageError, match="at least 4 rows"):
        difference(slots, 4, target, 0)
    with pytest.raises(UsageError, match="0 to 4"):
        difference(slots, 5, target, 1)
    with pytest.raises(UsageError, match="shape"):
        difference(slots, 0, np.zeros((1, 2, 1), np.int32), 1)
    with pytest.raises(UsageError, match="negative position"):
        difference(slots, 0, target - 1, 1)
    with pytest.raises(UsageError, match="num_free"):
        difference(slots, 0, target, -1)

"""Into how many pieces resident sets are cut."""

from __future__ import annotations

import pytest

from herald_kernels.ops.resident_attention.splits import (
    ALONE,
    START,
    WORKSPACE_BYTES,
    Device,
    Plan,
    makespan,
    plan,
    round_length,
)

H200 = Device(132, 2)


def num_tiles(max_length: int, keys: int = 64) -> int:
    """Of a set of this length, the lane and its parent."""
    return -(-(round_length(max_length) + 64) // keys)


def cut(num_lanes: int, max_length: int, queries: int = 64, keys: int = 64, device: Device = H200) -> Plan:
    """Lanes of 8 KV heads and 128 queries."""
    programs = num_lanes * 8 * 128 // queries
    return plan(num_tiles(max_length, keys), keys, programs, num_lanes * 8 * 128, 128, device)


@pytest.mark.parametrize(
    ("length", "rounded"),
    [(0, 0), (1, 1), (7, 7), (8, 8), (9, 10), (1024, 1024), (1025, 1280), (1638, 1792), (2047, 2048)],
)
def test_lengths_are_rounded_up_to_a_quarter_of_a_power_of_two(length: int, rounded: int) -> None:
    assert round_length(length) == rounded


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 8, 16, 17, 20, 24, 33, 40, 100])
@pytest.mark.parametrize("length", [0, 40, 1638, 6553, 100_000])
def test_pieces_cover_the_longest_set(lanes: int, length: int) -> None:
    chosen, tiles = cut(lanes, length), num_tiles(length)
    assert (chosen.pieces - 1) * chosen.tiles_per_piece < tiles <= chosen.pieces * chosen.tiles_per_piece


def test_one_lane_is_spread_over_the_device() -> None:
    for length, fewest, most in ((1638, 6, 12), (6553, 12, 16), (32_768, 15, 16)):
        assert fewest <= cut(1, length).pieces <= most


def test_sets_that_fill_the_device_once_stay_whole() -> None:
    for lanes in (8, 16, 17, 20, 24, 32, 40):
        assert cut(lanes, 1638) == Plan(num_tiles(1638), 1)


@pytest.mark.parametrize(("lanes", "length", "pieces"), [(16, 6553, 1), (8, 32_768, 2), (4, 131_072, 4)])
def test_large_tiles_fill_the_device_once(lanes: int, length: int, pieces: int) -> None:
    assert cut(lanes, length, queries=128, keys=128, device=Device(132, 1)).pieces == pieces


def test_partial_results_fit_the_workspace() -> None:
    for lanes in (1, 10, 100, 1000, 10_000):
        pieces = cut(lanes, 1 << 20).pieces
        assert pieces == 1 or pieces * lanes * 8 * 128 * 129 * 4 <= WORKSPACE_BYTES


def test_an_empty_set_is_whole() -> None:
    assert cut(1, 0) == Plan(1, 1)


def test_waves_run_one_after_the_other() -> None:
    assert makespan(264, 100, H200) == START + 100
    assert makespan(265, 100, H200) == 2 * START + (1 + ALONE) * 100
    assert makespan(400, 100, H200) == 2 * START + 200
    assert makespan(133, 100, Device(132, 1)) == 2 * START + 200

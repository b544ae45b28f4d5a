"""The arena hands out ranges that never overlap, and says when there is no room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from herald.engine.arena import DeviceArena
from herald.errors import ResidentSetTooSmall, RetrievalFailed
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import run, tokens

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_ranges_never_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = DeviceArena(1, 1, 1, 100, torch.float32, CPU)
    held: list[tuple[int, int]] = []
    for take, rows in steps:
        if take:
            start = arena.allocate(rows)
            if start is None:
                continue
            assert 0 <= start <= 100 - rows
            assert all(start + rows <= begin or begin + size <= start for begin, size in held)
            held.append((start, rows))
        elif held:
            arena.release(*held.pop(rows % len(held)))
        assert arena.rows_free == 100 - sum(size for _, size in held)
    for part in held:
        arena.release(*part)
    assert arena.idle and arena.allocate(100) == 0


def test_double_release_is_an_error() -> None:
    arena = DeviceArena(1, 1, 1, 10, torch.float32, CPU)
    start = arena.allocate(4)
    assert start == 0
    arena.release(0, 4)
    with pytest.raises(ValueError, match="twice"):
        arena.release(0, 4)


def test_an_empty_range_takes_nothing() -> None:
    for capacity in (0, 10):
        arena = DeviceArena(1, 1, 1, capacity, torch.float32, CPU)
        starts = [arena.allocate(0) for _ in range(3)]
        assert None not in starts
        for _ in starts:
            arena.release(0, 0)
        assert arena.idle and arena.rows_free == capacity


def test_resize() -> None:
    arena = DeviceArena(2, 3, 4, 10, torch.float32, CPU, poison=True)
    arena.allocate(6)
    with pytest.raises(ValueError, match="owns rows"):
        arena.resize(20)
    arena.release(0, 6)
    arena.resize(20)
    assert arena.rows.shape == (2, 3, 20, 8) and arena.rows.isnan().all()
    assert arena.allocate(20) == 0
    arena.release(0, 20)
    with pytest.raises(ResidentSetTooSmall):
        arena.resize(1 << 48)
    assert arena.capacity == 0 and arena.idle


def test_no_room_names_the_bytes_and_what_to_lower() -> None:
    with pytest.raises(ResidentSetTooSmall, match=r"no room for .* bytes .*lower kv_budget"):
        DeviceArena(64, 64, 128, 1 << 40, torch.float32, CPU)


def test_a_request_without_room_fails_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reports the request whose resident set cannot be allocated, and serves the next one."""
    engine = make_engine("sdar_b8", DENSE)
    real = engine.memory.ensure

    def ensure(arena_rows: int, pages: int, keep_prefixes: bool, requests: int) -> None:
        if arena_rows > 500:
            raise ResidentSetTooSmall("no room", "lower kv_budget")
        real(arena_rows, pages, keep_prefixes, requests)

    monkeypatch.setattr(engine.memory, "ensure", ensure)
    big = engine.add_request([1] * 900, SamplingParams(max_tokens=8))
    small = engine.add_request([1] * 90, SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert isinstance(big.error, ResidentSetTooSmall)
    assert small.error is None and len(small.output_ids) == 8


def test_programs_do_not_outlive_the_rows_they_read(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the arena comes back as large as it was, because there was no room for two requests."""
    engine = make_engine("sdar_b8", DENSE)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (expected,) = tokens(run(engine, [[1] * 90], params))
    capacity, programs = engine.memory.arena.capacity, list(engine.runner.programs)
    make_rows = DeviceArena._make_rows

    def with_limit(self: DeviceArena, shape: tuple[int, int, int, int], *kind: Any) -> None:
        if shape[2] > capacity:
            raise RuntimeError("no room")
        make_rows(self, shape, *kind)

    monkeypatch.setattr(DeviceArena, "_make_rows", with_limit)
    assert tokens(run(engine, [[1] * 90] * 2, params)) == [expected] * 2
    assert engine.memory.arena.capacity == capacity
    assert programs and not set(programs) & set(engine.runner.programs)


@pytest.mark.parametrize("name", ["embed", "finish_layer"])
def test_no_room_for_a_prefill_ends_its_request_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether its memory is missing at its begin or in the middle."""
    engine = make_engine("sdar_b8", DENSE)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (expected,) = tokens(run(engine, [[1] * 90], params))
    calls: list[Any] = []
    real = getattr(engine.model, name)

    def limited(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return real(*args)

    monkeypatch.setattr(engine.model, name, limited)
    first, second = (engine.add_request([1] * 90, params) for _ in range(2))
    while engine.has_work:
        engine.step()
    assert isinstance(first.error, RetrievalFailed)
    assert "prefilled" in str(first.error)
    assert list(second.output_ids) == expected and engine.memory.arena.idle

"""The page allocator, against a plain model of it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald.errors import HostPoolTooSmall, InvalidOption, UsageError
from herald.kvstore import PageAllocator


def test_prefers_a_contiguous_run_over_lower_ids() -> None:
    pages = PageAllocator(8)
    first = pages.allocate(6)
    assert first.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.dtype == np.int32
    pages.release([1, 3, 4])
    assert pages.allocate(2).tolist() == [3, 4]
    assert pages.allocate(3).tolist() == [1, 6, 7]


def test_too_many_takes_nothing_and_says_how_many_are_free() -> None:
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(HostPoolTooSmall, match="at most 3 pages"):
        pages.allocate(4)
    assert pages.num_free == 3
    assert pages.allocate(0).size == 0


def test_release_and_retain_refuse_without_changing_anything() -> None:
    pages = PageAllocator(4)
    pages.allocate(2)
    for bad in ([0, 2], [0, 0], [0, 4], [-1, 0]):
        with pytest.raises(UsageError):
            pages.release(bad)
    for bad in ([0, 3], [1, 9]):
        with pytest.raises(UsageError):
            pages.retain(bad)
    assert [pages.references(p) for p in range(4)] == [1, 1, 0, 0]
    assert pages.num_free == 2
    pages.retain([0, 0])
    pages.release([0, 0, 0])
    with pytest.raises(UsageError, match="page 0"):
        pages.release([0])


def test_needs_a_page() -> None:
    with pytest.raises(InvalidOption):
        PageAllocator(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from("are"), st.integers(0, 5), st.integers(0, 30)), max_size=30),
)
def test_follows_a_model(size: int, steps: list[tuple[str, int, int]]) -> None:
    pages = PageAllocator(size)
    model = [0] * size
    held: list[list[int]] = []
    for action, count, pick in steps:
        if action == "a":
            free = [p for p in range(size) if model[p] == 0]
            if count > len(free):
                with pytest.raises(HostPoolTooSmall):
                    pages.allocate(count)
                continue
            got = pages.allocate(count).tolist()
            runs = [r for r in range(size - count + 1) if all(model[r + i] == 0 for i in range(count))]
            assert got == (list(range(runs[0], runs[0] + count)) if runs and count else free[:count])
            held.append(got)
            change = 1
        elif not held:
            continue
        elif action == "r":
            got = held[pick % len(held)]
            pages.retain(got)
            held.append(got)
            change = 1
        else:
            got = held.pop(pick % len(held))
            pages.release(got)
            change = -1
        for page in got:
            model[page] += change
        assert [pages.references(p) for p in range(size)] == model
        assert pages.num_free == model.count(0)


def test_threads_never_share_a_page_by_accident() -> None:
    pages = PageAllocator(64)
    clashes = []
    owner = [0] * 64

    def work(me: int) -> None:
        for _ in range(100):
            got = pages.allocate(5)
            clashes.extend(p for p in got if owner[p])
            for p in got:
                owner[p] = me
            for p in got:
                owner[p] = 0
            pages.release(got)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pages.num_free == 64

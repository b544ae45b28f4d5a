"""Layers scored by a device choose the rows that the CPU's kernels choose; every task is taken once."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch

from herald import cuda_driver
from herald.config import IndexBits
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.kvstore.native import find_native
from herald.select import Selector, device_scan
from herald.select.device_scan import LAYERS_LEFT, DeviceScan, ScanJob
from tests.unit.select.device_case import HEADS, LAYERS, Case, Slow, native

pytestmark = pytest.mark.skipif(native is None, reason=find_native().reason)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("small_pieces", [False, True])
@pytest.mark.parametrize("held", [0, 2, LAYERS])
@pytest.mark.parametrize("shape", [(8, 16, 5, 12), (64, 128, 32, 40), (32, 64, 4, 9)], ids=str)
def test_layers_of_the_device_are_those_of_the_cpu(
    device: str,
    bits: IndexBits,
    small_pieces: bool,
    held: int,
    shape: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if small_pieces:  # a layer is several pieces, and they are used again
        monkeypatch.setattr(device_scan, "PIECE_BYTES", 3 * HEADS * shape[0] * shape[1])
    case = Case(*shape, pin=device == "cuda", bits=bits)
    scan = case.scan(device, held)
    left = 0 if held == LAYERS else LAYERS_LEFT
    alone = case.selector()
    rows = shape[0] * shape[3]
    try:
        scan.warm_up()
        for first, last, k in [(0, rows, 7), (4, rows - 3, 11), (shape[0] + 1, rows - shape[0], 5)]:
            expected = alone.select(case.pages, first, last, k, case.queries, case.lse, 0.3)
            job, claims = case.job(first, last, k), native.Claims(LAYERS * HEADS)
            share = scan.start(job, claims)
            share.wait()
            assert share.layers == LAYERS - left
            assert (job.out[:left] == -1).all()
            assert np.array_equal(job.out[left:], expected[left:])
    finally:
        scan.close()
        alone.close()
        case.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("held", [3, LAYERS])
def test_layers_that_stay_follow_what_is_written(device: str, bits: IndexBits, held: int) -> None:
    """Pages that fill up, that another request takes over, and all of them after memory was given back."""
    case = Case(16, 32, 8, 30, pin=device == "cuda", bits=bits)
    scan, alone = case.scan(device, held), case.selector()
    left = 0 if held == LAYERS else LAYERS_LEFT
    size, rng = 16, np.random.default_rng(3)

    def check(last: int) -> int:
        """Bytes that crossed for the index, after the same rows were chosen."""
        expected = alone.select(case.pages, 0, last, 9, case.queries, case.lse, 0.3)
        job = case.job(0, last, 9)
        scan.start(job, native.Claims(LAYERS * HEADS)).wait()
        assert np.array_equal(job.out[left:], expected[left:])
        assert scan._memory is not None
        return int((scan._memory.held_versions >= 0).sum())

    try:
        assert check(100) == 7
        assert check(480) == 30
        for page, start in [(5, 0), (5, 7), (29, 0), (0, 3)]:
            pool_page = int(case.pages[page])
            case.pool.rows[:, pool_page, :, start:] = torch.from_numpy(
                rng.standard_normal(case.pool.rows[:, pool_page, :, start:].shape, dtype=np.float32)
            )
            case.index.append_span(case.pages, page * size + start, (page + 1) * size)
            assert check(480) == 30
        scan.let_go()
        assert check(320) == 20
    finally:
        scan.close()
        alone.close()
        case.close()


def test_what_stays_crosses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    scan = case.scan("cpu", LAYERS)
    copied: list[int] = []
    move = ctypes.memmove

    def watch(to: int, source: int, count: int) -> None:
        if case.index.codes.ctypes.data <= source < case.index.codes.ctypes.data + case.index.codes.nbytes:
            copied.append(count)
        move(to, source, count)

    monkeypatch.setattr(cuda_driver.ctypes, "memmove", watch)
    of_page = case.index.codes[0, 0].nbytes
    for written, pages in [(None, 30), (None, 0), (18, 1), (None, 0)]:
        copied.clear()
        if written is not None:
            case.index.append(0, written, 0, 16)
        scan.start(case.job(0, 480, 9), native.Claims(LAYERS * HEADS)).wait()
        assert sum(copied) == LAYERS * pages * of_page
    scan.close()
    case.close()


def test_a_device_that_holds_the_index_leaves_the_cpu_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    alone = case.selector()
    held = Selector(
        case.pool, case.index, num_threads=2, device=torch.device("cpu"), device_bytes=case.index.num_bytes
    )
    assert held.device_scan is not None and held.device_scan.holds_index
    held.device_scan._least = 0
    expected = alone.select(case.pages, 3, 470, 9, case.queries, case.lse, 0.3)
    monkeypatch.setattr(native, "select", lambda *_: pytest.fail("the CPU scans"))
    assert np.array_equal(held.select(case.pages, 3, 470, 9, case.queries, case.lse, 0.3), expected)
    assert held.device_scan.layers == LAYERS
    held.close()
    alone.close()
    case.close()


@pytest.mark.parametrize("device", DEVICES)
def test_both_sides_together_choose_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 32, 8, 30, pin=device == "cuda")
    alone, shared = case.selector(), case.selector(torch.device(device))
    assert shared.device_scan is not None
    shared.device_scan._least = 0
    # The CPU would be done with so little before the device has begun.
    begun = threading.Event()
    monkeypatch.setattr(shared, "_native", Slow(native, begun, native.select))
    run = shared.device_scan._run

    def announce(*arguments: Any) -> int:
        threading.Timer(0.002, begun.set).start()
        return run(*arguments)

    monkeypatch.setattr(shared.device_scan, "_run", announce)
    try:
        for turn in range(20):
            begun.clear()
            first, last, k = turn, 480 - 7 * turn, 3 + turn
            expected = alone.select(case.pages, first, last, k, case.queries, case.lse, 0.3)
            got = shared.select(case.pages, first, last, k, case.queries, case.lse, 0.3)
            assert np.array_equal(got, expected)
        assert shared.device_scan.layers > 0
    finally:
        alone.close()
        shared.close()
        case.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_and_prompts_of_any_size_take_turns(device: str, bits: IndexBits) -> None:
    """Other numbers of query rows, longer requests, and copies that end with a registration."""
    case = Case(16, 32, 40, 64, pin=device == "cuda", bits=bits)
    scan = DeviceScan(native, case.index, torch.device(device), "auto", least=0)
    alone = case.selector()
    try:
        for positions, last in [(8, 100), (40, 500), (8, 1024), (5, 30), (40, 1000), (8, 100)]:
            queries = np.ascontiguousarray(case.queries[:, :positions])
            lse = np.ascontiguousarray(case.lse[:, :positions])
            out = np.full((LAYERS, HEADS, 9), -1, dtype=np.int32)
            job = ScanJob(case.pages, 3, last, queries, lse, 0.3, out)
            scan.start(job, native.Claims(LAYERS * HEADS)).wait()
            expected = alone.select(case.pages, 3, last, 9, queries, lse, 0.3)
            assert np.array_equal(out[LAYERS_LEFT:], expected[LAYERS_LEFT:])
    finally:
        scan.close()
        alone.close()
        case.close()


def test_copies_stay_within_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_scan, "REGISTER_BYTES", 1000)
    case = Case(16, 32, 8, 30, pin=False)
    copied: list[tuple[int, int]] = []
    move = ctypes.memmove

    def watch(to: int, source: int, count: int) -> None:
        copied.append((source, count))
        move(to, source, count)

    monkeypatch.setattr(cuda_driver.ctypes, "memmove", watch)
    scan = DeviceScan(native, case.index, torch.device("cpu"), "auto", least=0)
    alone, job = case.selector(), case.job(0, 480, 9)
    scan.start(job, native.Claims(LAYERS * HEADS)).wait()
    expected = alone.select(case.pages, 0, 480, 9, case.queries, case.lse, 0.3)
    assert np.array_equal(job.out[LAYERS_LEFT:], expected[LAYERS_LEFT:])
    for array in case.index.arrays:
        base = array.ctypes.data
        within = [(at - base, count) for at, count in copied if base <= at < base + array.nbytes]
        assert bool(within) == bool(array.size)
        assert all(at // 1000 == (at + count - 1) // 1000 for at, count in within)
    scan.close()
    alone.close()
    case.close()


def test_a_closed_scan_lets_go_of_the_index() -> None:
    """An engine that grows makes its next index while somebody may still hold the old scan."""
    case = Case(16, 32, 8, 30, pin=False)
    scan = DeviceScan(native, case.index, torch.device("cpu"), "auto", least=0)
    scan.start(case.job(0, 480, 9), native.Claims(LAYERS * HEADS)).wait()
    maps = [slab._map for slab in case.index._slabs]
    scan.close()
    scan.close()
    case.close()
    assert all(memory.closed for memory in maps)


@pytest.mark.parametrize("device", DEVICES)
def test_warms_up_for_any_number_of_layers(device: str) -> None:
    pool = HostPool(RowLayout(1, 2, 16, 8, torch.float32), 2, pin=False)
    index = KeyIndex(pool, 8, pin=device == "cuda")
    scan = DeviceScan(native, index, torch.device(device), "auto")
    scan.warm_up()
    assert scan.layers == 1
    scan.close()
    index.close()
    pool.close()


@pytest.mark.gpu
def test_its_memory_is_nobody_elses() -> None:
    """What the main stream freed is still read by work that is queued there: the scan must not get it."""
    case = Case(64, 128, 32, 40, pin=True)
    size = device_scan.PIECE_BYTES
    freed = [torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 29)
    sums = [memory.sum() for memory in freed]
    del freed
    scan = DeviceScan(native, case.index, torch.device("cuda"), "auto", least=0)
    scan.warm_up()
    scan.start(case.job(0, 2560, 7), native.Claims(LAYERS * HEADS)).wait()
    assert not any(int(total) for total in sums)
    scan.close()
    case.close()


def test_what_does_not_pay_stays_with_the_cpu() -> None:
    case = Case(16, 32, 8, 30, pin=False)
    scan = DeviceScan(native, case.index, torch.device("cpu"), "auto", least=LAYERS * HEADS * 100)
    try:
        assert scan.pays(case.pages, 0, 100)
        assert not scan.pays(case.pages, 0, 99)
        scattered = np.arange(0, 2 * (device_scan.MAX_RUNS + 1), 2, dtype=np.int32)
        assert not scan.pays(scattered, 0, 1000)
    finally:
        scan.close()
        case.close()


def test_why_a_device_scans_nothing() -> None:
    layout = RowLayout(1, 1, 16, 8, torch.float32)
    pool = HostPool(layout, 2, pin=False)
    for bits, options, expected in [
        (1, {}, "8 and 4 bits, and the index has 1"),
        (8, {"backend": "numba"}, "the extension does not scan here"),
    ]:
        index = KeyIndex(pool, bits)  # type: ignore[arg-type]
        selector = Selector(pool, index, device=torch.device("cpu"), **options)  # type: ignore[arg-type]
        assert selector.device_scan is None
        assert expected in selector.device_reason
        selector.close()
        index.close()
    index = KeyIndex(pool, 8)
    selector = Selector(pool, index, device=torch.device("cuda"))
    assert selector.device_reason == "the key index is not page-locked: not asked for"
    selector.close()
    index.close()
    pool.close()


def test_claims_are_taken_once() -> None:
    """Threads at both ends: no task is lost or taken twice, and what is to be left is left."""
    for count in (0, 1, 7, 1000):
        claims = native.Claims(count)
        taken: list[list[int]] = [[] for _ in range(4)]
        leave = 5

        def front(mine: list[int], claims: Any = claims) -> None:
            while (task := claims.front()) >= 0:
                mine.append(task)

        def back(mine: list[int], claims: Any = claims, leave: int = leave) -> None:
            while (task := claims.back(3, leave)) >= 0:
                mine.extend(range(task, task + 3))

        threads = [
            threading.Thread(target=side, args=(mine,))
            for side, mine in zip((front, front, back, back), taken, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(task for mine in taken for task in mine) == list(range(count))
    claims = native.Claims(10)
    assert claims.back(4, 6) == 6
    assert claims.back(4, 3) == -1
    assert [claims.front() for _ in range(7)] == [0, 1, 2, 3, 4, 5, -1]

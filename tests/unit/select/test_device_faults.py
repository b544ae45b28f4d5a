"""What a device that fails, or has no room, leaves behind: errors, memory, and the CPU's own selection."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from herald import cuda_driver
from herald.cuda_driver import HostDriver
from herald.errors import ResidentSetTooSmall
from herald.kvstore.native import find_native
from herald.select import Selector, device_scan
from herald.select.device_scan import LAYERS_LEFT, LAYERS_UNDER_WAY, DeviceScan
from tests.unit.select.device_case import HEADS, LAYERS, Case, Slow, native

pytestmark = pytest.mark.skipif(native is None, reason=find_native().reason)

LOCK = threading.Lock()


def driver_of(scan: DeviceScan) -> HostDriver:
    assert scan._memory is not None
    driver = scan._memory.driver
    assert isinstance(driver, HostDriver)
    return driver


def test_an_error_of_the_device_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    shared = case.selector(torch.device("cpu"))
    assert shared.device_scan is not None
    shared.device_scan._least = 0
    started = threading.Event()

    shared.device_scan.warm_up()
    driver = driver_of(shared.device_scan)
    driver.error = 719
    run = shared.device_scan._run

    def fail(*arguments: Any) -> int:
        try:
            return run(*arguments)
        finally:
            started.set()

    monkeypatch.setattr(shared.device_scan, "_run", fail)
    # The CPU must not be done before the device has begun.
    select = native.select
    monkeypatch.setattr(shared, "_native", Slow(native, started, select))
    try:
        with pytest.raises(RuntimeError, match="cuMemcpyHtoDAsync: CUDA error 719"):
            shared.select(case.pages, 0, 480, 9, case.queries, case.lse, 0.3)
    finally:
        shared.close()
        case.close()


@pytest.mark.parametrize("held", [0, LAYERS])
@pytest.mark.parametrize("lost", [False, True])
def test_after_an_error_the_next_selection_gets_its_own(lost: bool, held: int) -> None:
    """Every selection gets its error, however many there are; and its rows, once the device answers again."""
    case = Case(16, 32, 8, 30, pin=False)
    scan = case.scan("cpu", held)
    left = 0 if held else LAYERS_LEFT
    scan.start(case.job(0, 480, 9), native.Claims(LAYERS * HEADS)).wait()
    case.index.append(0, int(case.pages[4]), 0, 16)
    driver = driver_of(scan)
    driver.error = 719
    for _ in range(LAYERS_UNDER_WAY + 2):
        with pytest.raises(RuntimeError, match="CUDA error 719"):
            scan.start(case.job(0, 480, 9), native.Claims(LAYERS * HEADS)).wait()
        assert scan._memory is not None
        assert (scan._memory.held_versions == -1).all()
    if not lost:
        driver.error = 0
        alone, job = case.selector(), case.job(0, 480, 9)
        share = scan.start(job, native.Claims(LAYERS * HEADS))
        share.wait()
        expected = alone.select(case.pages, 0, 480, 9, case.queries, case.lse, 0.3)
        assert np.array_equal(job.out[left:], expected[left:])
        alone.close()
    scan.close()
    case.close()


def test_a_device_without_room_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 32, 8, 30, pin=False)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_scan.torch, "zeros", full)
    with pytest.raises(ResidentSetTooSmall, match=r"no room for 5 layers of the key index \([\d,]+ bytes\)"):
        case.scan("cpu", LAYERS)
    case.close()


class Audited(HostDriver):
    """A driver that counts what is taken and not given back, and fails when the ``fails_at``-th is taken."""

    handles: ClassVar[Iterator[int]] = itertools.count(1)
    live: ClassVar[set[tuple[str, int]]] = set()
    taken: ClassVar[int] = 0
    fails_at: ClassVar[int] = 0
    failure: ClassVar[type[Exception]] = RuntimeError

    def event(self, blocking: bool) -> int:
        return self._take("event", next(self.handles))

    def capture(self, work: Callable[[], None]) -> int:
        return self._take("graph", super().capture(work))

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._count()
        yield

    def release(self, graphs: list[int], events: list[int]) -> None:
        for each in [*(("graph", g) for g in graphs), *(("event", e) for e in events)]:
            Audited.live.remove(each)
        super().release(graphs, events)

    def _count(self) -> None:
        Audited.taken += 1
        if Audited.taken == Audited.fails_at:
            raise self.failure("no more of them")

    def _take(self, kind: str, handle: int) -> int:
        self._count()
        Audited.live.add((kind, handle))
        return handle


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> type[Audited]:
    monkeypatch.setattr(device_scan, "HostDriver", Audited)
    Audited.live, Audited.taken, Audited.fails_at = set(), 0, 0
    Audited.failure = RuntimeError
    return Audited


@pytest.mark.parametrize("held", [0, 2, LAYERS])
def test_what_fails_half_way_gives_everything_back(audited: type[Audited], held: int) -> None:
    """Each memory, event and graph that a selection takes is refused once; the next selection has its own."""
    case = Case(16, 32, 8, 6, pin=False)
    alone = case.selector()
    expected = alone.select(case.pages, 0, 96, 9, case.queries, case.lse, 0.3)
    left = 0 if held == LAYERS else LAYERS_LEFT
    scan = case.scan("cpu", held)
    scan.warm_up()
    before, number, ended = set(audited.live), 0, False
    while not ended:
        number += 1
        audited.taken, audited.fails_at = 0, number
        job = case.job(0, 96, 9)
        try:
            scan.start(job, native.Claims(LAYERS * HEADS)).wait()
            ended = True
        except RuntimeError as error:
            assert str(error) == "no more of them"
            assert audited.live == before
    assert number > LAYERS_UNDER_WAY * 5
    assert np.array_equal(job.out[left:], expected[left:])
    scan.close()
    assert not audited.live
    alone.close()
    case.close()


class Faulty(HostDriver):
    """A driver of whose calls one fails: the ``fails_at``-th of function ``call``, counted from 1."""

    call: ClassVar[int] = 0
    fails_at: ClassVar[int] = 0
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self._inner = self._functions
        self._functions = [
            type(function)(partial(self._count, number)) for number, function in enumerate(self._inner)
        ]
        self.calls = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions]

    def _count(self, number: int, *arguments: Any) -> int:
        if number == Faulty.call:
            with LOCK:
                Faulty.made += 1
                if Faulty.made == Faulty.fails_at:
                    return 700
        return int(self._inner[number](*arguments))


@pytest.mark.parametrize("held", [0, 2, LAYERS])
@pytest.mark.parametrize("function", [name for name in cuda_driver.CALLS if name != "cuStreamSynchronize"])
def test_whatever_call_fails(held: int, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection gets that error, whichever thread met it, and the next one its rows."""
    call, name = cuda_driver.CALLS.index(function), function.removesuffix("_v2")
    monkeypatch.setattr(device_scan, "HostDriver", Faulty)
    monkeypatch.setattr(device_scan, "PIECE_BYTES", 6 * HEADS * 16 * 32)
    Faulty.call, Faulty.fails_at = call, 0
    case = Case(16, 32, 8, 30, pin=False)
    alone, scan, left = case.selector(), case.scan("cpu", held), 0 if held == LAYERS else LAYERS_LEFT
    expected = alone.select(case.pages, 3, 470, 9, case.queries, case.lse, 0.3)
    Faulty.made = 0
    scan.start(case.job(3, 470, 9), native.Claims(LAYERS * HEADS)).wait()
    calls = Faulty.made
    assert calls > 0
    for fails_at in {1, 2, calls // 2, calls}:
        if not 1 <= fails_at <= calls:
            continue
        for page in case.pages:
            case.index.append(0, int(page), 0, 16)
        Faulty.made, Faulty.fails_at = 0, fails_at
        with pytest.raises(RuntimeError, match=f"^{name}: CUDA error 700$"):
            scan.start(case.job(3, 470, 9), native.Claims(LAYERS * HEADS)).wait()
        job = case.job(3, 470, 9)
        scan.start(job, native.Claims(LAYERS * HEADS)).wait()
        assert np.array_equal(job.out[left:], expected[left:])
    scan.close()
    alone.close()
    case.close()


@pytest.mark.parametrize("held", [0, 2, LAYERS])
def test_without_room_for_buffers_the_cpu_selects(
    audited: type[Audited], held: int, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    alone = case.selector()
    room = -(-case.index.num_bytes * held // LAYERS)
    shared = Selector(case.pool, case.index, num_threads=2, device=torch.device("cpu"), device_bytes=room)
    scan = shared.device_scan
    assert scan is not None and shared.device_reason == ""
    scan._least = 0
    expected = alone.select(case.pages, 3, 470, 9, case.queries, case.lse, 0.3)

    def select() -> np.ndarray:
        return shared.select(case.pages, 3, 470, 9, case.queries, case.lse, 0.3)

    audited.failure, audited.fails_at = torch.OutOfMemoryError, audited.taken + 7
    for _ in range(3):
        assert np.array_equal(select(), expected)
    assert scan.layers == 0 and not audited.live and scan._memory is None
    assert "the device has no room" in shared.device_reason
    assert len(caplog.records) == 1
    scan.let_go()
    assert shared.device_reason == ""
    assert np.array_equal(select(), expected)
    assert audited.live
    shared.close()
    alone.close()
    case.close()


def test_a_scan_that_cannot_be_made_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    before = threading.active_count()
    monkeypatch.setattr(device_scan, "HostDriver", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        case.scan("cpu", LAYERS)
    assert threading.active_count() == before
    case.close()


@pytest.mark.parametrize("held", [2, LAYERS])
def test_a_selection_that_others_did_brings_nothing(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its copies would still be under way when it is over, and the index may go then."""
    case = Case(16, 32, 8, 30, pin=False)
    scan = case.scan("cpu", held)
    scan.warm_up()
    monkeypatch.setattr(cuda_driver.ctypes, "memmove", lambda *_: pytest.fail("a copy"))
    claims = native.Claims(LAYERS * HEADS)
    while claims.front() >= 0:
        pass
    job = case.job(0, 480, 9)
    share = scan.start(job, claims)
    share.wait()
    assert share.layers == 0 and (job.out == -1).all()
    scan.close()
    case.close()


@pytest.mark.parametrize("held", [0, 1, LAYERS])
def test_pieces_are_for_layers_that_cross(held: int) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    scan = case.scan("cpu", held)
    scan.warm_up()
    assert scan._memory is not None
    assert len(scan._memory.codes) == (0 if held == LAYERS else device_scan.PIECES)
    scan.close()
    case.close()


def test_too_little_memory_for_a_layer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(16, 32, 8, 30, pin=False)
    of_layer = case.index.num_bytes // LAYERS
    scan = DeviceScan(native, case.index, torch.device("cpu"), "auto", device_bytes=of_layer - 1)
    assert scan.layers_held == 0
    assert str(of_layer) in caplog.text
    scan.close()
    case.close()


@pytest.mark.gpu
@pytest.mark.parametrize("fails_at", [1, 3, 9])
def test_a_gpu_gets_back_what_was_taken(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording fails, then memory is refused: nothing stays, and the next selection has its rows."""
    case = Case(16, 32, 8, 30, pin=True)
    alone, scan = case.selector(), case.scan("cuda", 2)
    expected = alone.select(case.pages, 0, 480, 9, case.queries, case.lse, 0.3)
    record, recorded = cuda_driver.CudaDriver.capture, []

    def capture(driver: cuda_driver.CudaDriver, work: Callable[[], None]) -> int:
        recorded.append(driver)
        return record(driver, (lambda: 1 // 0) if len(recorded) == fails_at else work)

    def select() -> np.ndarray:
        job = case.job(0, 480, 9)
        share = scan.start(job, native.Claims(LAYERS * HEADS))
        share.wait()
        return job.out[LAYERS_LEFT:] if share.layers else job.out

    monkeypatch.setattr(cuda_driver.CudaDriver, "capture", capture)
    with pytest.raises(ZeroDivisionError):
        select()
    assert scan._memory is not None and not scan._memory._by_width
    before = torch.cuda.memory_allocated()
    assert np.array_equal(select(), expected[LAYERS_LEFT:])
    scan._memory._by_width.popitem()[1].close()
    assert torch.cuda.memory_allocated() == before
    with monkeypatch.context() as patch:
        patch.setattr(cuda_driver.CudaDriver, "capture", _refuse)
        assert (select() == -1).all() and scan.reason
    scan.let_go()
    assert np.array_equal(select(), expected[LAYERS_LEFT:])
    scan.close()
    alone.close()
    case.close()


def _refuse(*_: Any) -> int:
    raise torch.OutOfMemoryError

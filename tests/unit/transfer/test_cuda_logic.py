"""The CUDA side's bookkeeping with events that happen when the test says so. Needs no GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from herald.errors import UsageError
from herald.transfer import RowMove
from herald.transfer import streams as streams_module
from herald.transfer.cuda import CudaTransfer, DeviceTicket, Ring
from herald.transfer.pinned import PinnedRing
from herald.transfer.streams import DeviceClock, DeviceStreams


class FakeEvent:
    """An event that happens by hand, or (``at_once``) when it is recorded."""

    at_once = False

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.time: float | None = None
        self._happened = threading.Event()

    def record(self, stream: object = None) -> None:
        if self.at_once:
            self.happen(time.perf_counter())

    def happen(self, when: float) -> None:
        self.time = when
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        assert self._happened.wait(10), "waited for an event that never happens"

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.time is not None and end.time is not None
        assert end.time >= self.time, "the elapsed time of events in the wrong order is not defined"
        return (end.time - self.time) * 1e3


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.waited.append(FakeEvent())

    def synchronize(self) -> None:
        return None


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    return current


class Slot:
    def __init__(self) -> None:
        self.busy: FakeEvent | None = None


def test_a_slot_is_reused_when_its_own_work_is_done() -> None:
    ring = Ring(Slot, 2)
    first, second = ring.acquire(), ring.acquire()
    ring.release(first)
    ring.release(second)
    assert first.busy is not None and second.busy is not None
    second.busy.happen(0.0)
    got: list[Slot] = []
    thread = threading.Thread(target=lambda: got.append(ring.acquire()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not got, "a slot was handed out while the device still read it"
    first.busy.happen(1.0)
    thread.join(10)
    assert got == [first]
    assert ring.acquire() is second


def test_a_ticket_is_done_after_issue_and_end(fake_cuda: FakeStream) -> None:
    device = torch.device("cuda", 0)
    ticket = DeviceTicket(64, device, DeviceClock(device))
    ticket._end.happen(0.0)
    assert not ticket.done(), "the end of an event that was never recorded is no completion"
    ticket = DeviceTicket(64, device, DeviceClock(device))
    ticket.begin()
    ticket.finish_issue()
    assert not ticket.done() and ticket.span is None and ticket.seconds is None
    ticket.wait_device()
    assert fake_cuda.waited == [ticket._end]
    ticket._end.happen(0.0)
    assert ticket.done()
    ticket.wait_host()


def test_waiting_for_a_ticket_waits_for_its_issue(fake_cuda: FakeStream) -> None:
    device = torch.device("cuda", 0)
    ticket = DeviceTicket(64, device, DeviceClock(device))
    thread = threading.Thread(target=ticket.wait_device)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not fake_cuda.waited, "the stream waits for an event not recorded yet"
    ticket.begin()
    ticket.finish_issue()
    thread.join(10)
    assert fake_cuda.waited == [ticket._end]


def test_a_failed_ticket_raises_and_has_no_span() -> None:
    device = torch.device("cuda", 0)
    ticket = DeviceTicket(64, device, DeviceClock(device))
    ticket.begin()
    ticket.fail(ValueError("no launch"))
    for wait in (ticket.done, ticket.wait_host, ticket.wait_device):
        with pytest.raises(ValueError, match="no launch"):
            wait()
    assert ticket.span is None


def recorded(when: float) -> FakeEvent:
    event = FakeEvent()
    event.happen(when)
    return event


def test_spans_before_and_after_the_base_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock is ahead by ``skew``; `FakeEvent.elapsed_time` refuses the wrong order."""
    skew = 1000.0
    monkeypatch.setattr(FakeEvent, "at_once", True)
    happen = FakeEvent.happen
    monkeypatch.setattr(FakeEvent, "happen", lambda self, when: happen(self, when + skew))
    clock = DeviceClock(torch.device("cuda", 0))
    bases = []
    record_base = clock._record_base
    monkeypatch.setattr(clock, "_record_base", lambda: bases.append(record_base()) or bases[-1])

    now = time.perf_counter()
    assert clock.span(recorded(now - 2), recorded(now - 1), now - 3) == pytest.approx(
        (now - 2, now - 1), abs=0.4
    )
    after = time.perf_counter()
    early = clock.span(recorded(after + 1), recorded(after + 2), after)
    assert early == pytest.approx((after + 1, after + 2), abs=0.4)
    assert len(bases) == 1, "a fresh base serves the transfers that follow it"

    # Issued before the base, asked about after it, as work under way is: no base for what comes next.
    late = clock.span(recorded(after - 2), recorded(after - 1), now - 3)
    assert late == pytest.approx((after - 2, after - 1), abs=0.4) and len(bases) == 2
    begin = time.perf_counter()
    clock.span(recorded(begin + 1), recorded(begin + 2), after)
    assert len(bases) == 2, (
        "one piece of work that was issued before the base made the next ones need another"
    )

    monkeypatch.setattr(streams_module, "BASE_SECONDS", 0.0)
    clock.span(recorded(after - 2), recorded(after - 1), after - 3)
    assert len(bases) == 3, "the clocks drift: an old base must not serve for ever"


class FakeStreams:
    """Streams of a device whose memory is the host's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copy, self.back, self.load = FakeStream(), FakeStream(), FakeStream()
        self.current: list[FakeStream] = []

    def on(self, stream: FakeStream) -> AbstractContextManager[None]:
        self.current.append(stream)
        return nullcontext()


class FakeTransfer(CudaTransfer):
    """Moves rows as soon as they are issued; `gate` holds moves up while they are."""

    def __init__(self, pool: torch.Tensor, arena: torch.Tensor, streams: Any) -> None:
        super().__init__(pool, arena, streams)
        self.gate = threading.Event()
        self.gate.set()

    def _bring(self, move: RowMove, after: Any, ticket: DeviceTicket) -> None:
        assert self.gate.wait(10)
        ids = self._send_ids(move, ticket, [move.src_rows, move.dst_rows])
        self.arena_rows[ids[1]] = self.pool_rows[ids[0]]


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> FakeTransfer:
    monkeypatch.setattr(FakeEvent, "at_once", True)
    monkeypatch.setattr(PinnedRing, "_allocate", lambda self, n: torch.zeros(n, dtype=torch.uint8))
    pool = torch.arange(40.0).view(10, 4)
    return FakeTransfer(pool, torch.full((8, 4), -1.0), FakeStreams())


def test_each_direction_has_its_stream(transfer: FakeTransfer) -> None:
    streams: Any = transfer.streams
    before = FakeEvent()
    transfer.submit(RowMove(np.array([3]), np.array([0])), before)
    transfer.write_back(transfer.arena_rows[0], transfer.pool_rows[9])
    layer, after = torch.empty(2, 4, 4), FakeEvent()
    transfer.load_pages([transfer.pool_rows[:8].view(2, 2, 2, 4)], layer, after)
    assert streams.current == [streams.copy, streams.back, streams.load]
    assert before in streams.copy.waited and before not in streams.back.waited
    assert after in streams.load.waited and after not in streams.copy.waited
    assert torch.equal(transfer.pool_rows[9], transfer.pool_rows[3])
    transfer.close()


def test_a_write_back_is_issued_while_a_move_waits_for_a_buffer(transfer: FakeTransfer) -> None:
    transfer.gate.clear()
    ids = np.array([1])
    mover = threading.Thread(target=transfer.submit, args=(RowMove(ids, ids),))
    mover.start()
    transfer.write_back(torch.full((4,), 5.0), transfer.pool_rows[0]).wait_host()
    assert mover.is_alive() and (transfer.pool_rows[0] == 5).all()
    transfer.gate.set()
    mover.join()
    transfer.close()


def test_device_rows_outlive_the_ring_and_the_ticket(
    transfer: FakeTransfer, fake_cuda: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[object] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append(stream))
    src, dst, then = (np.array(ids) for ids in ([2, 7], [6, 7], [1, 4]))
    ticket = transfer.submit(RowMove(src, dst, then))
    for ids in (src, dst, then):
        ids[:] = 0
    rows = ticket.device_rows()
    assert [part.tolist() for part in rows] == [[6, 7], [1, 4]]
    assert used == [fake_cuda, fake_cuda], "memory of the copy stream, used on another one"
    with pytest.raises(UsageError, match="without then_rows"):
        transfer.submit(RowMove(src, src)).device_rows()
    transfer.close()


@pytest.mark.parametrize("use", ["submit", "write_back"])
def test_a_closed_transfer_takes_nothing(transfer: FakeTransfer, use: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: transfer.submit(RowMove(np.array([0]), np.array([0]))),
        "write_back": lambda: transfer.write_back(transfer.arena_rows[0], transfer.pool_rows[0]),
    }
    transfer.close()
    transfer.close()
    with pytest.raises(UsageError, match="closed"):
        calls[use]()


def test_completed_tickets_are_forgotten_and_failed_ones_are_not(transfer: FakeTransfer) -> None:
    move = RowMove(np.array([0]), np.array([0]))
    transfer.delay = lambda: (_ for _ in ()).throw(OSError("lost otherwise"))
    transfer.submit(move)
    transfer.delay = None
    for _ in range(50):
        transfer.submit(move)
    assert len(transfer._unsettled) == 1 and len(transfer._failed) == 1
    with pytest.raises(OSError, match="lost otherwise"):
        transfer.close()


@pytest.mark.parametrize("current_device", [0, 1])
def test_streams_are_current_inside_only(monkeypatch: pytest.MonkeyPatch, current_device: int) -> None:
    """Device and stream of the calling thread are what they were, after an error too."""
    device, streams = current_device, {0: "default of 0", 1: "default of 1"}

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            self.index = device.index

    def set_stream(stream: object) -> None:
        nonlocal device
        device = stream.index if isinstance(stream, Stream) else int(str(stream)[-1])
        streams[device] = stream

    def set_device(index: int) -> None:
        nonlocal device
        device = index

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    made = DeviceStreams("cuda:1")
    for stream in (made.copy, made.back, made.load):
        with pytest.raises(ValueError, match="inside"), made.on(stream):
            assert device == 1 and streams == {0: "default of 0", 1: stream}
            raise ValueError("inside")
        assert device == current_device and streams == {0: "default of 0", 1: "default of 1"}

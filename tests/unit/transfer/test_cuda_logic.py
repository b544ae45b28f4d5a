"""The CUDA side's bookkeeping with events that happen when the test says so. Needs no GPU."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from herald.transfer import streams as streams_module
from herald.transfer.cuda import DeviceTicket, Ring
from herald.transfer.streams import DeviceClock


class FakeEvent:
    """An event that happens by hand, or (``at_once``) when it is recorded."""

    at_once = False

    def __init__(self, enable_timing: bool = False) -> None:
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
        (now - 2, now - 1), abs=0.05
    )
    after = time.perf_counter()
    early = clock.span(recorded(after + 1), recorded(after + 2), after)
    assert early == pytest.approx((after + 1, after + 2), abs=0.05)
    assert len(bases) == 1, "a fresh base serves the transfers that follow it"

    monkeypatch.setattr(streams_module, "BASE_SECONDS", 0.0)
    clock.span(recorded(after - 2), recorded(after - 1), after - 3)
    assert len(bases) == 2, "the clocks drift: an old base must not serve for ever"

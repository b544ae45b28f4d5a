"""The ring of page-locked memory, with a device that reads as late as it may. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from herald.transfer.pinned import PinnedRing


class LateDevice:
    """Copies happen only when somebody waits for the event behind them."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []
        self.events: list[LateEvent] = []

    def run_until(self, event: LateEvent) -> None:
        while event in self.events:
            for read in self.events.pop(0).reads:
                read()

    def finish(self) -> None:
        if self.events:
            self.run_until(self.events[-1])


class LateEvent:
    device: LateDevice

    def record(self) -> None:
        self.reads, self.device.pending = self.device.pending, []
        self.device.events.append(self)

    def synchronize(self) -> None:
        self.device.run_until(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    LateEvent.device = device
    real_copy = torch.Tensor.copy_

    def copy_later(out: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        device.pending.append(partial(real_copy, out, source))
        return out

    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(PinnedRing, "_allocate", lambda self, n: torch.zeros(n, dtype=torch.uint8))
    return device


def test_arrays_stand_one_behind_the_other(device: LateDevice) -> None:
    out = torch.zeros(2, 10, dtype=torch.int64)
    first, second = np.arange(10), np.arange(100, 110)
    PinnedRing(4096).send(out, [first, second])
    first[:], second[:] = -1, -1  # the caller may change them now
    assert len(device.events) == 1, "the ids of a usual move take one copy"
    assert (out == 0).all()
    device.finish()
    assert out.tolist() == [list(range(10)), list(range(100, 110))]


def test_more_than_the_ring_goes_in_pieces(device: LateDevice) -> None:
    out = torch.zeros(3, 1000, dtype=torch.int64)
    arrays = [np.arange(1000) + 1000 * part for part in range(3)]
    PinnedRing(1024).send(out, arrays)
    device.finish()
    np.testing.assert_array_equal(out.numpy(), arrays)


@pytest.mark.parametrize("most", [64, 300, 700, 5000])
def test_a_range_is_kept_until_the_device_has_read_it(device: LateDevice, most: int) -> None:
    rng = np.random.default_rng(most)
    ring = PinnedRing(2048)
    sent: list[tuple[torch.Tensor, np.ndarray]] = []
    for _ in range(300):
        array = rng.integers(0, 255, int(rng.integers(0, most)), dtype=np.uint8)
        out = torch.zeros(len(array), dtype=torch.uint8)
        ring.send(out, [array.copy()])
        sent.append((out, array))
    device.finish()
    for out, array in sent:
        np.testing.assert_array_equal(out.numpy(), array)


def test_nobody_waits_while_the_ring_has_room(device: LateDevice) -> None:
    ring = PinnedRing(4096)
    for _ in range(4):
        ring.send(torch.zeros(1000, dtype=torch.uint8), [np.zeros(1000, np.uint8)])
    assert len(device.events) == 4
    ring.send(torch.zeros(1000, dtype=torch.uint8), [np.zeros(1000, np.uint8)])
    assert len(device.events) == 4, "only the oldest range was waited for"

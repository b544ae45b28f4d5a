"""The host slab: alignment, views, refusal, closing, pinning."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from herald import hardware
from herald.errors import HostPoolTooSmall, InvalidOption, UsageError
from herald.kvstore import HostSlab, host_memory

MIB = 1 << 20


def test_aligned_zeroed_and_writable() -> None:
    with HostSlab(5 * MIB + 3, pin=False, num_threads=2) as slab:
        assert slab.address % host_memory.HUGE_PAGE_BYTES == 0
        view = slab.tensor(torch.uint8, (5 * MIB + 3,))
        assert not view.any()
        view[-1] = 7
        assert slab.tensor(torch.uint8, (5 * MIB + 3,))[-1] == 7
        assert view.data_ptr() == slab.address
        assert not slab.pinned
        assert slab.pin_reason == "not asked for"


def test_takes_what_it_was_asked_for_not_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    real = mmap.mmap

    def spy(fd: int, size: int, **options: int) -> mmap.mmap:
        mapped.append((size, options["flags"]))
        return real(fd, size, **options)

    monkeypatch.setattr(host_memory.mmap, "mmap", spy)
    HostSlab(9 * MIB, pin=False).close()
    # Huge pages to align the start, and private memory: huge pages do not apply to shared mappings.
    assert mapped == [(9 * MIB + host_memory.HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_views_of_every_dtype_share_the_memory(dtype: torch.dtype) -> None:
    with HostSlab(4096, pin=False) as slab:
        view = slab.tensor(dtype, (4, 8))
        view.fill_(3)
        assert torch.equal(slab.tensor(dtype, (32,)), torch.full((32,), 3, dtype=dtype))


def test_a_view_larger_than_the_slab_is_refused() -> None:
    with HostSlab(4096, pin=False) as slab, pytest.raises(UsageError, match="at most 4096 bytes"):
        slab.tensor(torch.float32, (1025,))


def test_too_large_says_how_much_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    info = hardware.MemoryInfo(8 << 30, 8 << 30, 1 << 30, 300 << 20)
    monkeypatch.setattr(hardware, "memory", lambda: info)
    fits = (300 << 20) - (256 << 20)
    with pytest.raises(HostPoolTooSmall, match=f"at most {fits} bytes"):
        HostSlab(fits + 1, pin=False)
    HostSlab(fits, pin=False, num_threads=1).close()


def test_too_large_for_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: hardware.MemoryInfo(1 << 62, 1 << 62, None, None))
    with pytest.raises(HostPoolTooSmall, match="mapping"):
        HostSlab(1 << 60, pin=False)


@pytest.mark.parametrize("options", [{"num_bytes": 0}, {"num_bytes": 8, "register_bytes": 3 << 20}])
def test_bad_sizes(options: dict[str, int]) -> None:
    with pytest.raises(InvalidOption):
        HostSlab(pin=False, **options)


def test_close_waits_for_live_views() -> None:
    slab = HostSlab(MIB, pin=False)
    view = slab.tensor(torch.int32, (16,))
    view.copy_(torch.arange(16))
    slab.close()
    slab.close()
    assert slab.closed
    assert view.tolist() == list(range(16))
    with pytest.raises(UsageError, match="closed"):
        slab.tensor(torch.int32, (1,))


def test_close_unmaps_when_no_view_lives() -> None:
    slab = HostSlab(MIB, pin=False)
    mapping = slab._map
    slab.close()
    assert mapping.closed


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_pin_without_cuda_is_not_an_error() -> None:
    with HostSlab(MIB, pin=True) as slab:
        assert not slab.pinned
        assert "CUDA" in slab.pin_reason


class FakeRuntime:
    def __init__(self, fail_at: int) -> None:
        self.live: dict[int, int] = {}
        self.fail_at = fail_at

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.live) == self.fail_at:
            raise RuntimeError("out of memory")
        self.live[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.live[address]


def test_registers_piece_by_piece_and_unregisters(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(fail_at=99)
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: (runtime, ""))
    slab = HostSlab(5 * MIB, pin=True, register_bytes=2 * MIB)
    assert slab.pinned
    assert slab.pin_reason == ""
    base = slab.address
    assert runtime.live == {base: 2 * MIB, base + 2 * MIB: 2 * MIB, base + 4 * MIB: MIB}
    assert 0 < slab.seconds["pin"] < slab.seconds["all"] and slab.seconds["map"] < slab.seconds["all"]
    slab.close()
    assert runtime.live == {}
    assert not slab.pinned


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_piece_is_registered_when_all_of_it_was_touched(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Untouched memory can be registered, page by page on one core: slow, and nothing fails."""
    touched: list[tuple[int, int]] = []
    real_touch = host_memory._touch

    def touch(memory: np.ndarray) -> None:
        real_touch(memory)
        touched.append((memory.ctypes.data, memory.size))

    class Checking(FakeRuntime):
        def register(self, address: int, num_bytes: int) -> None:
            inside = sum(size for at, size in touched if address <= at < address + num_bytes)
            assert inside == num_bytes, "registered before it was touched"
            super().register(address, num_bytes)

    runtime = Checking(fail_at=99)
    monkeypatch.setattr(host_memory, "_touch", touch)
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: (runtime, ""))
    with HostSlab(33 * MIB, pin=True, num_threads=num_threads, register_bytes=8 * MIB) as slab:
        assert slab.pinned and sum(size for _, size in touched) == 33 * MIB
        assert list(runtime.live.values()) == [8 * MIB] * 4 + [MIB]


def test_a_failed_registration_leaves_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(fail_at=1)
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: (runtime, ""))
    with HostSlab(5 * MIB, pin=True, register_bytes=2 * MIB) as slab:
        assert not slab.pinned
        assert "out of memory" in slab.pin_reason
        assert runtime.live == {}
        slab.tensor(torch.uint8, (8,)).fill_(1)


@pytest.mark.gpu
def test_every_registered_piece_is_pinned() -> None:
    with HostSlab(8 * MIB, pin=True, register_bytes=2 * MIB) as slab:
        assert slab.pinned, slab.pin_reason
        host = slab.tensor(torch.uint8, (8 * MIB,))
        host.copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 256, 8 * MIB, dtype=np.uint8)))
        assert host.is_pinned()
        device = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        for begin in range(0, 8 * MIB, 2 * MIB):
            piece = slice(begin, begin + 2 * MIB)
            device[piece].copy_(host[piece], non_blocking=True)
        piece = slice(4 * MIB - 512, 4 * MIB)
        small = host[piece].to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), host)
        assert torch.equal(small.cpu(), host[piece])
        device.fill_(9)
        host[piece].copy_(device[piece], non_blocking=True)
        torch.cuda.synchronize()
        assert host[piece].eq(9).all()

"""How a move becomes launches: a stand-in for CuPy's driver binding runs them on host memory."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from herald.errors import InvalidOption
from herald.transfer import GatherKernel, RowMove, ZeroCopyTransfer, zero_copy
from herald.transfer import gather_kernel as module
from herald.transfer.cuda import CudaTransfer
from herald.transfer.gather_kernel import BULK, REGISTERS, CompiledGather, launch_rows

HANDLE, STREAM = 0x1234, 0x77


class FakeDriver:
    """Copies the rows that each launch names, and notes how it was launched."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.launches: list[tuple[int, int]] = []
        self.options: tuple[str, ...] = ()

    def launchKernel(
        self, handle: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, *rest: int
    ) -> None:
        self.shared, stream, places, extra = rest
        assert (handle, stream, extra, gy, gz, by, bz) == (HANDLE, STREAM, 0, 1, 1, 1, 1)
        src, dst, src_ids, dst_ids, n = (
            ctypes.c_int64.from_address(at).value for at in (ctypes.c_int64 * 5).from_address(places)
        )
        for s, d in zip(read_ids(src_ids, n), read_ids(dst_ids, n), strict=True):
            assert min(s, d) >= 0 and max(s, d) < 300, "an id of another list"
            ctypes.memmove(dst + d * self.row_bytes, src + s * self.row_bytes, self.row_bytes)
        self.launches.append((gx, n))


def read_ids(address: int, n: int) -> list[int]:
    return list((ctypes.c_int64 * n).from_address(address))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(row_bytes=32)

    def raw_module(code: str, options: tuple[str, ...]) -> Any:
        fake.options = options
        kernel = types.SimpleNamespace(ptr=HANDLE)
        return types.SimpleNamespace(
            get_function=lambda name: types.SimpleNamespace(kernel=kernel, name=name)
        )

    cupy = types.SimpleNamespace(RawModule=raw_module, cuda=types.SimpleNamespace(driver=fake))
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize(
    ("n", "most", "rows"),
    [
        (1, 0, [1]),
        (1, 7, [1]),
        (7, 7, [7]),
        (8, 7, [7, 1]),
        (21, 7, [7, 7, 7]),
        (22, 7, [7, 7, 7, 1]),
        (5, 1, [1, 1, 1, 1, 1]),
        (5000, 0, [5000]),
    ],
)
def test_rows_of_each_launch(n: int, most: int, rows: list[int]) -> None:
    assert launch_rows(n, most).tolist() == rows


@pytest.mark.parametrize("n", [module.MAX_LAUNCHES * 4, module.MAX_LAUNCHES * 4 + 1, 999_983])
def test_a_long_move_gets_larger_pieces_instead_of_more(n: int) -> None:
    rows = launch_rows(n, 4)
    assert len(rows) <= module.MAX_LAUNCHES and rows.sum() == n and rows.min() > 0
    assert (rows[:-1] == rows[0]).all()
    assert rows[0] == max(4, -(-n // module.MAX_LAUNCHES))


def some_rows(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, 32), dtype=np.uint8)


@pytest.mark.parametrize("n", [1, 9, 10, 11, 20, 137])
@pytest.mark.parametrize("most", [0, 1, 10, 1000])
def test_pieces_bring_what_one_launch_brings(driver: FakeDriver, n: int, most: int) -> None:
    rng = np.random.default_rng(n)
    pool, arena = some_rows(rng, 300), np.zeros((200, 32), np.uint8)
    # Between the two lists lies something else: a piece must not run on into it.
    ids = np.full((3, n), -(1 << 40))
    ids[0], ids[2] = rng.integers(0, 300, n), rng.permutation(200)[:n]
    gather = CompiledGather(BULK, 32, 16)
    addresses = (pool.ctypes.data, arena.ctypes.data, ids[0].ctypes.data, ids[2].ctypes.data)
    gather.launch(STREAM, 2, *addresses, n, most)
    expected = np.zeros_like(arena)
    expected[ids[2]] = pool[ids[0]]
    np.testing.assert_array_equal(arena, expected)
    assert [rows for _, rows in driver.launches] == launch_rows(n, most).tolist()
    assert driver.shared == BULK.shared_bytes(32)


def test_no_block_is_launched_that_has_nothing_to_do(driver: FakeDriver) -> None:
    kernel = GatherKernel("bulk", warps=1, depth=2, width=4)  # 8 rows under way
    pool, arena, ids = np.zeros((40, 32), np.uint8), np.zeros((40, 32), np.uint8), np.arange(40)
    gather = CompiledGather(kernel, 32, 16)
    addresses = (pool.ctypes.data, arena.ctypes.data, ids.ctypes.data, ids.ctypes.data)
    gather.launch(STREAM, 3, *addresses, 40, 17)
    assert driver.launches == [(3, 17), (3, 17), (1, 6)]


class HostStreams:
    """Streams of a device whose memory is the host's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copy = self.back = types.SimpleNamespace(cuda_stream=STREAM)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        yield


@pytest.fixture
def make(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ZeroCopyTransfer]:
    """Makes transfers whose moves are launched on host memory, for `bring`."""

    def start(self: CudaTransfer, pool: torch.Tensor, arena: torch.Tensor, streams: Any) -> None:
        super(CudaTransfer, self).__init__(pool, arena)
        self.streams = streams

    def send_ids(self: CudaTransfer, move: RowMove, ticket: Any, arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(arrays))

    monkeypatch.setattr(CudaTransfer, "__init__", start)
    monkeypatch.setattr(CudaTransfer, "_send_ids", send_ids)
    monkeypatch.setattr(zero_copy, "zero_copy_problem", lambda pool, device: "")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def of(capability: tuple[int, int] = (9, 0), width: int = 16, **options: Any) -> ZeroCopyTransfer:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        driver.row_bytes = 2 * width
        pool = torch.arange(100 * width, dtype=torch.int16).view(100, width)
        return ZeroCopyTransfer(pool, torch.zeros_like(pool), HostStreams(), **options)  # type: ignore[arg-type]

    return of


@pytest.mark.parametrize(
    ("launch_bytes", "pieces"),
    [(0, [50]), (32 * 20, [20, 20, 10]), (32 * 21 - 1, [20, 20, 10]), (1, [1] * 50)],
)
def test_launch_bytes_are_whole_rows(
    make: Callable[..., ZeroCopyTransfer], driver: FakeDriver, launch_bytes: int, pieces: list[int]
) -> None:
    transfer = make(launch_bytes=launch_bytes)
    rng = np.random.default_rng(0)
    move = RowMove(rng.integers(0, 100, 50), rng.permutation(100)[:50])
    transfer._bring(move, None, None)  # type: ignore[arg-type]
    assert [rows for _, rows in driver.launches] == pieces
    expected = torch.zeros_like(transfer.arena_rows)
    expected[torch.from_numpy(move.dst_rows)] = transfer.pool_rows[torch.from_numpy(move.src_rows)]
    assert torch.equal(transfer.arena_rows, expected)


def test_a_move_of_nothing_is_not_launched(make: Callable[..., ZeroCopyTransfer], driver: FakeDriver) -> None:
    none = np.empty(0, np.int64)
    make()._bring(RowMove(none, none), None, None)  # type: ignore[arg-type]
    assert not driver.launches


@pytest.mark.parametrize(
    ("capability", "width", "kernel"),
    [((9, 0), 256, BULK), ((10, 0), 256, BULK), ((8, 9), 256, REGISTERS), ((9, 0), 10, REGISTERS)],
)
def test_the_kernel_that_fits(
    make: Callable[..., ZeroCopyTransfer], capability: tuple[int, int], width: int, kernel: GatherKernel
) -> None:
    transfer = make(capability, width)
    assert transfer.kernel == kernel and transfer.blocks == 1 and transfer.launch_bytes == 1 << 20


@pytest.mark.parametrize("option", [{"blocks": 0}, {"launch_bytes": -1}, {"kernel": BULK}])
def test_options_that_are_refused(make: Callable[..., ZeroCopyTransfer], option: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(option))):
        make((8, 0), **option)

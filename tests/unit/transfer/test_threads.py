"""The CPU device's transfer: rows, order, completion, errors and races."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from herald.errors import UsageError
from herald.transfer import HostEvent, RowMove, ThreadTransfer

POOL_ROWS, ARENA_ROWS, WIDTH = 300, 120, 16


def random_move(rng: np.random.Generator, most: int = 40) -> RowMove:
    n = int(rng.integers(0, most + 1))
    return RowMove(rng.integers(0, POOL_ROWS, n), rng.permutation(ARENA_ROWS)[:n].astype(np.int64))


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(POOL_ROWS, WIDTH).to(torch.bfloat16)


@pytest.fixture
def arena() -> torch.Tensor:
    return torch.full((ARENA_ROWS, WIDTH), float("nan"), dtype=torch.bfloat16)


def bits(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.int16).numpy()


def test_200_submits_land_in_order(pool: torch.Tensor, arena: torch.Tensor) -> None:
    rng = np.random.default_rng(0)
    expected = bits(arena).copy()
    with ThreadTransfer(pool, arena) as transfer:
        tickets = []
        for _ in range(200):
            move = random_move(rng)
            expected[move.dst_rows] = bits(pool)[move.src_rows]
            tickets.append(transfer.submit(move))
            assert tickets[-1].bytes == len(move) * WIDTH * 2
        tickets[-1].wait_host()
        assert all(ticket.done() for ticket in tickets), "an earlier transfer ended after a later one"
        np.testing.assert_array_equal(bits(arena), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("width", [1, 3, 6, 32])
def test_any_row_size(dtype: torch.dtype, width: int) -> None:
    pool = torch.arange(20 * width).view(20, width).to(dtype)
    arena = torch.zeros(9, width, dtype=dtype)
    with ThreadTransfer(pool, arena) as transfer:
        transfer.submit(RowMove(np.array([19, 0, 7]), np.array([8, 3, 0]))).wait_device()
    expected = torch.zeros_like(arena)
    expected[[8, 3, 0]] = pool[[19, 0, 7]]
    assert torch.equal(arena, expected)


def test_rows_at_odd_addresses() -> None:
    raw = torch.arange(101, dtype=torch.uint8)
    pool, arena = raw[1:].view(10, 10), torch.zeros(41, dtype=torch.uint8)[1:].view(4, 10)
    with ThreadTransfer(pool, arena) as transfer:
        transfer.submit(RowMove(np.array([9, 4]), np.array([0, 3]))).wait_host()
    assert torch.equal(arena[[0, 3]], pool[[9, 4]])


def test_the_caller_goes_on_while_rows_travel(pool: torch.Tensor, arena: torch.Tensor) -> None:
    gate = threading.Event()
    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = lambda: gate.wait(10) and None
        ticket = transfer.submit(RowMove(np.array([5]), np.array([7])))
        assert not ticket.done()
        assert ticket.span is None and ticket.seconds is None
        assert torch.isnan(arena).all(), "a row moved before its transfer began"
        gate.set()
        ticket.wait_host()
        assert ticket.done() and torch.equal(arena[7], pool[5])


def test_span_is_on_the_host_clock_and_leaves_out_the_queue(pool: torch.Tensor, arena: torch.Tensor) -> None:
    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = lambda: time.sleep(0.02)
        before = time.perf_counter()
        tickets = [transfer.submit(RowMove(np.array([i]), np.array([i]))) for i in range(2)]
        tickets[1].wait_host()
        after = time.perf_counter()
    first, second = tickets[0].span, tickets[1].span
    assert first is not None and second is not None
    assert before + 0.019 <= first[0] <= first[1] <= second[0] - 0.019
    assert second[1] <= after
    assert tickets[1].seconds == second[1] - second[0]


def test_an_error_reaches_every_way_of_waiting(pool: torch.Tensor, arena: torch.Tensor) -> None:
    def broken() -> None:
        raise MemoryError("the worker's own")

    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = broken
        ticket = transfer.submit(RowMove(np.array([1]), np.array([1])))
        for wait in (ticket.wait_host, ticket.wait_device, ticket.done):
            with pytest.raises(MemoryError, match="the worker's own"):
                wait()
        assert ticket.span is None
        transfer.delay = None
        transfer.submit(RowMove(np.array([2]), np.array([2]))).wait_host()
        assert torch.equal(arena[2], pool[2]), "the worker died with the failed transfer"


def test_close_raises_the_error_nobody_saw(pool: torch.Tensor, arena: torch.Tensor) -> None:
    def broken() -> None:
        raise OSError("lost otherwise")

    transfer = ThreadTransfer(pool, arena)
    transfer.delay = broken
    transfer.submit(RowMove(np.array([1]), np.array([1])))
    for i in range(50):
        transfer.write_back(arena[i % 10], torch.empty_like(arena[0]))
    with pytest.raises(OSError, match="lost otherwise"):
        transfer.close()
    transfer.close()


def test_close_during_work_completes_it(pool: torch.Tensor, arena: torch.Tensor) -> None:
    transfer = ThreadTransfer(pool, arena)
    transfer.delay = lambda: time.sleep(0.001)
    tickets = [transfer.submit(RowMove(np.array([i]), np.array([i]))) for i in range(20)]
    transfer.close()
    assert all(ticket.done() for ticket in tickets)
    assert torch.equal(arena[:20], pool[:20])
    with pytest.raises(UsageError, match="closed"):
        transfer.submit(RowMove(np.array([1]), np.array([1])))
    with pytest.raises(UsageError, match="closed"):
        transfer.write_back(arena[:1], torch.empty_like(arena[:1]))


def test_submits_of_many_threads_with_random_delays(pool: torch.Tensor, arena: torch.Tensor) -> None:
    """Each thread owns a stripe of the arena and checks its rows as soon as its ticket is done."""
    jitter = random.Random(1)
    wrong: list[str] = []

    def work(part: int) -> None:
        rng = np.random.default_rng(part)
        rows = np.arange(part * 30, part * 30 + 30)
        for _ in range(15):
            n = int(rng.integers(1, 30))
            move = RowMove(rng.integers(0, POOL_ROWS, n), rng.permutation(rows)[:n])
            transfer.submit(move).wait_host()
            if not (bits(arena)[move.dst_rows] == bits(pool)[move.src_rows]).all():
                wrong.append(f"thread {part}: rows {move.dst_rows} were not there when their ticket was")

    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = lambda: time.sleep(jitter.random() * 1e-3)
        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_row_written_back_can_be_fetched_when_the_host_has_waited(
    pool: torch.Tensor, arena: torch.Tensor
) -> None:
    arena[:4] = torch.arange(4 * WIDTH).view(4, WIDTH).to(torch.bfloat16)
    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = lambda: time.sleep(0.002)
        back = transfer.write_back([arena[0:2], arena[2:4]], [pool[50:52], pool[10:12]])
        back.wait_host()
        assert back.done() and back.bytes == 4 * WIDTH * 2
        ticket = transfer.submit(RowMove(np.array([50, 51, 10, 11]), np.array([60, 61, 62, 63])), HostEvent())
        ticket.wait_host()
    assert torch.equal(arena[60:64], arena[:4])


@pytest.mark.parametrize("held", ["submit", "write_back"])
def test_neither_direction_queues_behind_the_other(
    pool: torch.Tensor, arena: torch.Tensor, held: str
) -> None:
    gate = threading.Event()

    class Gate:
        def synchronize(self) -> None:
            assert gate.wait(10)

    move = RowMove(np.array([5]), np.array([7]))
    source = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    with ThreadTransfer(pool, arena) as transfer:
        after = {held: Gate()}
        move_ticket = transfer.submit(move, after.get("submit"))
        back = transfer.write_back(source, pool[:2], after.get("write_back"))
        stuck, free = (move_ticket, back) if held == "submit" else (back, move_ticket)
        free.wait_host()
        assert not stuck.done()
        gate.set()
        stuck.wait_host()
    assert torch.equal(arena[7], pool[5]) and (pool[:2] == 1).all()


def test_write_backs_keep_their_order(pool: torch.Tensor, arena: torch.Tensor) -> None:
    jitter = random.Random(2)
    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = lambda: time.sleep(jitter.random() * 1e-3)
        for i in range(30):
            ticket = transfer.write_back(torch.full((1, WIDTH), float(i)).to(torch.bfloat16), pool[:1])
        ticket.wait_host()
        assert (pool[0] == 29).all()


def test_a_ticket_knows_where_its_arrivals_go_next(pool: torch.Tensor, arena: torch.Tensor) -> None:
    src, dst, then = np.array([9, 4, 7]), np.array([100, 101, 102]), np.array([3, 50, 8])
    with ThreadTransfer(pool, arena) as transfer:
        ticket = transfer.submit(RowMove(src, dst, then))
        ticket.wait_device()
        staged, slots = ticket.device_rows()
        arena[slots] = arena[staged]
        plain = transfer.submit(RowMove(src, dst))
        with pytest.raises(UsageError, match="without then_rows"):
            plain.device_rows()
        with pytest.raises(UsageError, match="without then_rows"):
            transfer.write_back(arena[:1], torch.empty_like(arena[:1])).device_rows()
    assert torch.equal(arena[then], pool[src])


def test_write_back_keeps_its_source_alive(pool: torch.Tensor, arena: torch.Tensor) -> None:
    gate = threading.Event()
    with ThreadTransfer(pool, arena) as transfer:
        transfer.delay = lambda: gate.wait(10) and None
        source = torch.ones(4, WIDTH, dtype=torch.bfloat16)
        ticket = transfer.write_back(source, pool[:4])
        del source
        torch.full((4, WIDTH), 7.0, dtype=torch.bfloat16)
        gate.set()
        ticket.wait_host()
    assert (pool[:4] == 1).all()

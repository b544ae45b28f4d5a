"""What every transfer refuses, and checksum mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herald.errors import TransferCorrupted, UsageError
from herald.transfer import RowMove, ThreadTransfer, Transfer, verify_rows
from herald.transfer.base import copy_pairs
from herald.transfer.packing import first_outside


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (np.zeros(2, np.int64), np.zeros((2, 1), np.int64)),
        (np.zeros(2, np.int64), np.zeros(3, np.int64)),
    ],
)
def test_a_move_is_two_int64_vectors_of_one_length(src: np.ndarray, dst: np.ndarray) -> None:
    with pytest.raises(UsageError):
        RowMove(src, dst)
    right = np.zeros(len(src), np.int64)
    if dst.ndim != 1 or len(dst) != len(src):
        with pytest.raises(UsageError, match="then_rows"):
            RowMove(right, right, dst)


def test_strided_ids_are_copied() -> None:
    ids = np.arange(10)[::2]
    move = RowMove(ids, ids)
    assert move.src_rows.flags.c_contiguous and move.dst_rows.tolist() == [0, 2, 4, 6, 8]


def test_first_outside() -> None:
    assert first_outside(np.array([0, 4, 2]), 5) == -1
    assert first_outside(np.array([0, 5, -1]), 5) == 1
    assert first_outside(np.array([0, 1, -1]), 5) == 2
    assert first_outside(np.empty(0, np.int64), 0) == -1
    for wrong in (np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, 1000):
        ids = np.arange(1000)
        ids[617] = wrong
        assert first_outside(ids, 1000) == 617


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0, 10], [0, 1], r"row 10 \(entry 1\) is outside the pool; use ids from 0 to 9"),
        ([-1], [0], r"row -1 \(entry 0\) is outside the pool"),
        ([0], [4], r"row 4 \(entry 0\) is outside the arena; use ids from 0 to 3"),
    ],
)
def test_ids_outside_are_refused_before_anything_moves(src: list[int], dst: list[int], message: str) -> None:
    arena = torch.zeros(4, 8)
    with ThreadTransfer(torch.ones(10, 8), arena) as transfer:
        with pytest.raises(UsageError, match=message):
            transfer.submit(RowMove(np.array(src), np.array(dst)))
        with pytest.raises(UsageError, match=r"row 4 \(entry 0\) is outside the arena"):
            transfer.submit(RowMove(np.array([0]), np.array([0]), np.array([4])))
    assert (arena == 0).all()


@pytest.mark.parametrize(
    ("pool", "arena"),
    [
        (torch.zeros(4, 8), torch.zeros(4, 6)),
        (torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.float16)),
        (torch.zeros(8, 4).T, torch.zeros(4, 8)),
        (torch.zeros(4, 2, 8), torch.zeros(4, 8)),
    ],
)
def test_rows_of_different_kinds_are_refused(pool: torch.Tensor, arena: torch.Tensor) -> None:
    with pytest.raises(UsageError):
        ThreadTransfer(pool, arena)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([torch.zeros(4)], [torch.zeros(4), torch.zeros(4)]),
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (torch.zeros(4, 4)[:, :2], torch.zeros(4, 2)),
        (torch.zeros(4, 2), torch.zeros(4, 4)[:, :2]),
        (torch.zeros(4), torch.zeros(4, device="meta")),
    ],
)
def test_write_back_refuses_what_is_not_bytes_for_bytes(src: torch.Tensor, dst: torch.Tensor) -> None:
    with pytest.raises(UsageError):
        copy_pairs(src, dst)


class OneBadRow:
    """A finished move of 70,000 rows, of which one can be spoilt."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.pool = torch.from_numpy(rng.standard_normal((100, 4)).astype(np.float32))
        self.arena = torch.full((70_001, 4), float("nan"))
        self.move = RowMove(rng.integers(0, 100, 70_000), rng.permutation(70_001)[:70_000])
        self.arena[self.move.dst_rows] = self.pool[self.move.src_rows]


@pytest.mark.parametrize("entry", [0, 69_999])
def test_verify_names_the_row_that_differs(entry: int) -> None:
    case = OneBadRow()
    verify_rows(case.move, case.pool, case.arena)
    src, dst = int(case.move.src_rows[entry]), int(case.move.dst_rows[entry])
    case.arena[dst, 3] += 1
    with pytest.raises(
        TransferCorrupted, match=rf"entry {entry} of 70000: pool row {src} .* arena row {dst};"
    ):
        verify_rows(case.move, case.pool, case.arena)


def test_verify_compares_bytes_not_numbers() -> None:
    pool = torch.tensor([[float("nan"), 0.0]])
    move = RowMove(np.array([0]), np.array([0]))
    verify_rows(move, pool, pool.clone())
    with pytest.raises(TransferCorrupted):
        verify_rows(move, pool, torch.tensor([[float("nan"), -0.0]]))


def test_a_transfer_is_abstract() -> None:
    with pytest.raises(TypeError):
        Transfer(torch.zeros(1, 1), torch.zeros(1, 1))  # type: ignore[abstract]

"""`copy_rows` moves the right bytes and no others."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import copy_rows
from tests.kernels.support import Draw, Target

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 100, 256, 5000])
def test_named_rows_arrive_and_the_rest_stays(target: Target, dtype: torch.dtype, width: int) -> None:
    draw = Draw(target, width)
    dst = draw.integers(0, 100, 60, width).to(dtype)
    src = draw.integers(100, 200, 40, width).to(dtype)
    dst_rows, src_rows = draw.permutation(60)[:37], draw.integers(0, 40, 37)
    expected = dst.clone()
    for to, source in zip(dst_rows.tolist(), src_rows.tolist(), strict=True):
        expected[to] = src[source]
    copy_rows(dst, dst_rows, src, src_rows)
    assert torch.equal(dst, expected)


def test_rows_of_strided_and_shifted_views(target: Target) -> None:
    draw = Draw(target, 1)
    store, other = draw.normal(20, 40), draw.normal(20, 40)
    expected = store.clone()
    expected[5, 3:20] = other[7, 1:18]
    copy_rows(store[:, 3:20], draw.integers(5, 6, 1), other[:, 1:18], draw.integers(7, 8, 1))
    assert torch.equal(store, expected)


def test_within_one_tensor(target: Target) -> None:
    draw = Draw(target, 2)
    rows = draw.normal(50, 64)
    order = draw.permutation(50)
    expected = rows.clone()
    expected[order[:20]] = rows[order[20:40]]
    copy_rows(rows, order[:20], rows, order[20:40])
    assert torch.equal(rows, expected)


def test_nan_payloads_keep_their_bits(target: Target) -> None:
    draw = Draw(target, 3)
    src = draw.integers(-(2**15), 2**15, 9, 128).to(torch.int16).view(torch.bfloat16)
    dst = torch.zeros_like(src)
    copy_rows(dst, draw.permutation(9), src, draw.permutation(9).sort().values)
    assert torch.equal(dst.view(torch.int16).sort(0).values, src.view(torch.int16).sort(0).values)


@pytest.mark.parametrize("num_rows", [1, 16, 45])
def test_rows_to_skip_and_rows_in_order(target: Target, num_rows: int) -> None:
    draw = Draw(target, 5)
    dst, src = draw.normal(60, 24), draw.normal(45, 24)
    dst_rows = draw.permutation(60)[:num_rows]
    dst_rows[::3] = -1
    expected = dst.clone()
    for source, to in enumerate(dst_rows.tolist()):
        if to >= 0:
            expected[to] = src[source]
    given = dst.clone()
    copy_rows(dst, dst_rows, src, None)
    assert torch.equal(dst, expected)
    copy_rows(given, dst_rows, src, torch.arange(num_rows, device=target.device))
    assert torch.equal(given, expected)


def test_nothing_but_rows_to_skip(target: Target) -> None:
    rows = Draw(target, 6).normal(20, 8)
    before = rows.clone()
    copy_rows(rows, torch.full((20,), -1, device=target.device), before + 1, None)
    assert torch.equal(rows, before)


def test_no_rows_is_no_work(target: Target) -> None:
    rows = Draw(target, 4).normal(3, 8)
    none = torch.zeros(0, dtype=torch.int64, device=target.device)
    before = rows.clone()
    copy_rows(rows, none, rows, none)
    assert torch.equal(rows, before)


def test_rows_that_do_not_fit_are_refused() -> None:
    rows, one, two = torch.zeros(4, 8), torch.tensor([1]), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"8 x torch.float32 against 4 x torch.float32"):
        copy_rows(rows, one, torch.zeros(4, 4), one)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        copy_rows(rows, one, rows.double(), one)
    with pytest.raises(ValueError, match="src has stride 4"):
        copy_rows(torch.zeros(4, 4), one, torch.zeros(4, 4).T, one)
    with pytest.raises(ValueError, match="1 rows to write, but 2 to read"):
        copy_rows(rows, one, rows, two)
    with pytest.raises(ValueError, match="2 rows to write, but src has 1"):
        copy_rows(rows, two, rows[:1], None)

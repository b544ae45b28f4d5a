"""The dot kernels alone: exact integers, fixed float order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from herald.select import tiles
from herald.select.log_sum import exp_in_place
from herald.select.reference import fma

needs_vnni = pytest.mark.skipif(not tiles.HAS_VNNI, reason="needs AVX-512 VNNI")
WIDTHS = [16, 32, 48, 64, 112, 256]


def make(width: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(width + dim)
    rows = rng.integers(-127, 128, (12, dim)).astype(np.int8)
    queries = rng.integers(-127, 128, (width, dim)).astype(np.int8)
    rows[0], queries[0], queries[-1] = -127, -127, 127
    return rows, queries


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dim", [16, 128, 1024])
def test_float_dots_are_exact_integers(width: int, dim: int) -> None:
    rows, queries = make(width, dim)
    out = np.full((12, width), np.nan, dtype=np.float32)
    packed = np.ascontiguousarray(queries.T, dtype=np.float32)[:, :, None]
    tiles.dots(rows.astype(np.float32), 12, packed, dim, np.zeros(width, np.int32), out)
    assert np.array_equal(out, rows.astype(np.int32) @ queries.astype(np.int32).T)


@needs_vnni
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dim", [16, 128, 1024])
def test_byte_dots_are_exact_integers(width: int, dim: int) -> None:
    rows, queries = make(width, dim)
    out = np.full((12, width), np.nan, dtype=np.float32)
    packed = np.ascontiguousarray(queries.reshape(width, dim // 4, 4).transpose(1, 0, 2))
    starts = -128 * queries.astype(np.int32).sum(1, dtype=np.int32)
    tiles.dots((rows.astype(np.int16) + 128).astype(np.uint8), 12, packed, dim // 4, starts, out)
    assert np.array_equal(out, rows.astype(np.int32) @ queries.astype(np.int32).T)


@pytest.mark.parametrize("vnni", [False, pytest.param(True, marks=needs_vnni)])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [12, 10, 1])
def test_largest_sums(width: int, count: int, vnni: bool) -> None:
    """Among the starts the smallest and the largest there are: nothing may wrap around."""
    rows, queries = make(width, 128)
    starts = np.random.default_rng(width).integers(-(10**6), 10**6, width).astype(np.int32)
    starts[::5], starts[3] = -(2**30), 2**30
    expected = (rows.astype(np.int64) @ queries.astype(np.int64).T + starts).max(axis=1)
    best, out = np.zeros((12, 16), np.int32), np.full(12, -7, np.int32)
    if vnni:
        packed = np.ascontiguousarray(queries.reshape(width, 32, 4).transpose(1, 0, 2))
        shifted = starts - 128 * queries.astype(np.int32).sum(1, dtype=np.int32)
        codes = (rows.astype(np.int16) + 128).astype(np.uint8)
        tiles.largest_sums(codes, count, packed, 32, shifted, best, out)
    else:
        packed = np.ascontiguousarray(queries.T, dtype=np.float32)[:, :, None]
        tiles.largest_sums(rows.astype(np.float32), count, packed, 128, starts, best, out)
    assert np.array_equal(out[:count], expected[:count])
    assert (out[count:] == -7).all()


def test_strided_arrays_are_refused() -> None:
    """The kernels read raw memory: an array that is not contiguous must not get that far."""
    rows, queries = make(16, 32)
    packed = queries.T.astype(np.float32)[:, :, None]
    assert not packed.flags.c_contiguous
    with pytest.raises(TypingError, match="contiguous"):
        tiles.dots(
            rows.astype(np.float32), 12, packed, 32, np.zeros(16, np.int32), np.empty((12, 16), np.float32)
        )


@pytest.mark.parametrize("width", WIDTHS)
def test_exact_dots_are_a_chain_of_fma_in_order(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((8, 40)).astype(np.float32)
    queries = rng.standard_normal((width, 40)).astype(np.float32)
    out = np.empty((8, width), dtype=np.float32)
    raw = np.ascontiguousarray(queries.T)
    tiles.exact_dots(rows, 8, raw, np.zeros(width, np.int32), out)
    expected = np.zeros((8, width), dtype=np.float32)
    for d in range(40):
        expected = fma(rows[:, d, None], queries[None, :, d], expected)
    assert np.array_equal(out, expected)


@needs_vnni
def test_the_inner_loop_is_vnni() -> None:
    rows, queries = make(64, 16)
    out = np.empty((12, 64), dtype=np.float32)
    packed = np.ascontiguousarray(queries.reshape(64, 4, 4).transpose(1, 0, 2))
    arguments = (rows.view(np.uint8), 12, packed, 4, np.zeros(64, np.int32), out)
    fresh = njit(tiles.dots.py_func)
    fresh(*arguments)
    assembly = next(iter(fresh.inspect_asm().values()))
    assert assembly.count("vpdpbusd") >= 16


def test_exp_is_close() -> None:
    x = np.linspace(-80, 0, 4001).astype(np.float32)
    got = x.copy()
    exp_in_place(got, np.empty(x.size, dtype=np.int32))
    expected = np.exp(x.astype(np.float64))
    assert np.abs(got / expected - 1).max() < 3e-7
    assert got[-1] == 1.0


def test_fma_rounds_once() -> None:
    """Against exact rational arithmetic, with sums that two roundings get wrong among them."""
    rng = np.random.default_rng(0)
    a = rng.integers(1, 1 << 24, 3000).astype(np.float32)
    b = (rng.integers(1, 1 << 24, 3000) * 2.0 ** rng.integers(-30, 30, 3000)).astype(np.float32)
    c = (rng.integers(-(1 << 24), 1 << 24, 3000) * 2.0 ** rng.integers(-30, 60, 3000)).astype(np.float32)
    # Half an ulp and a trifle: float64 alone rounds the trifle away first.
    a[:2], b[:2], c[:2] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**-60, -(2.0**-60)]
    for x, y, z, got in zip(a, b, c, fma(a, b, c)):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        neighbours = [np.nextafter(got, np.float32(s)) for s in (-np.inf, np.inf)]
        distance = abs(Fraction(float(got)) - exact)
        assert all(distance <= abs(Fraction(float(other)) - exact) for other in neighbours)

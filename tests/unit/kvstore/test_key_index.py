"""The key index: codes equal to a plain numpy reference, and what they are good for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from herald.errors import InvalidOption, UsageError
from herald.kvstore import HostPool, KeyIndex, RowLayout, key_codes, reference
from herald.kvstore.row_values import as_numpy, load_keys, value_kind

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_pool(head_dim: int = 16, dtype: torch.dtype = torch.float32, pages: int = 3) -> HostPool:
    pool = HostPool(RowLayout(2, 2, head_dim, 8, dtype), pages, pin=False)
    generator = torch.Generator().manual_seed(head_dim)
    values = torch.randn(pool.rows.shape, generator=generator) * 2 + 1
    pool.rows.copy_(values.to(dtype))
    return pool


def expect(pool: HostPool, index: KeyIndex, at: tuple[int, int, int], mean_rows: int) -> None:
    keys = pool.rows[at][:, : pool.layout.head_dim].float().numpy()
    mean = reference.page_mean(keys[:mean_rows])
    codes, scales = reference.quantise(reference.rotate(keys - mean, index.signs), index.bits)
    assert np.array_equal(index.means[at], mean)
    assert np.array_equal(index.codes[at], reference.pack(codes, index.bits))
    assert np.array_equal(index.scales[at], scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_codes_equal_the_reference_bit_by_bit(bits: int, head_dim: int, dtype: torch.dtype) -> None:
    pool = make_pool(head_dim, dtype)
    with KeyIndex(pool, bits) as index:
        index.append_span(np.array([2, 0], dtype=np.int32), 0, 16)
        for layer in range(2):
            for head in range(2):
                expect(pool, index, (layer, 2, head), 8)
                expect(pool, index, (layer, 0, head), 8)
        assert not index.codes[:, 1].any()
        assert not index.scales[:, 1].any()


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_appending_in_pieces_keeps_the_first_mean(bits: int) -> None:
    pool = make_pool()
    with KeyIndex(pool, bits) as index:
        index.append_block(1, 0, 3)
        before = index.codes[:, 1, :, :3].copy()
        index.append(0, 1, 3, 2)
        index.append(1, 1, 3, 2)
        index.append_block(1, 5, 3)
        assert np.array_equal(index.codes[:, 1, :, :3], before)
        for layer in range(2):
            for head in range(2):
                expect(pool, index, (layer, 1, head), 3)


def test_spans_in_mid_page_touch_only_their_rows() -> None:
    pool = make_pool()
    with KeyIndex(pool, 8) as index:
        pages = np.array([1, 2], dtype=np.int32)
        index.append_span(pages, 0, 11, layers=(1, 2))
        assert not index.scales[0].any()
        assert index.scales[1, 1].all()
        assert index.scales[1, 2, :, :3].all()
        assert not index.scales[1, 2, :, 3:].any()
        index.append_span(pages, 11, 16, layers=(1, 2))
        expect(pool, index, (1, 2, 0), 3)
        index.append_span(pages, 5, 5)


def test_threads_give_the_same_codes() -> None:
    pool = make_pool(pages=7)
    pages = np.random.default_rng(0).permutation(7).astype(np.int32)
    with KeyIndex(pool, 4) as one, KeyIndex(pool, 4) as many, ThreadPoolExecutor(3) as executor:
        for first, last in ((0, 3), (3, 50)):
            one.append_span(pages, first, last)
            many.append_span(pages, first, last, executor=executor)
        assert np.array_equal(one.codes, many.codes)
        assert np.array_equal(one.scales, many.scales)
        assert np.array_equal(one.means, many.means)


def test_codes_do_not_depend_on_values_rows() -> None:
    pool = make_pool()
    pool.rows[..., 16:] = float("nan")
    with KeyIndex(pool, 8) as index:
        index.append_block(0, 0, 8)
        expect(pool, index, (0, 0, 0), 8)


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.02), (4, 0.25)])
def test_decoded_keys_are_close_despite_an_outlier_channel(bits: int, tolerance: float) -> None:
    pool = make_pool(head_dim=64)
    pool.rows[..., 3] *= 30
    with KeyIndex(pool, bits) as index:
        index.append_block(0, 0, 8)
        keys = pool.rows[0, 0, 0, :, :64].numpy()
        codes = reference.unpack(index.codes[0, 0, 0], bits).astype(np.float32)
        rotated = reference.rotate(keys - index.means[0, 0, 0], index.signs) / 8.0
        error = np.abs(codes * index.scales[0, 0, 0][:, None] - rotated)
        assert error.max() <= tolerance * np.abs(rotated).std() * 2


def test_equal_keys_give_zero_codes_not_nan() -> None:
    pool = make_pool()
    pool.rows.fill_(3.0)
    for bits in (8, 4, 1):
        with KeyIndex(pool, bits) as index:
            index.append_block(0, 0, 8)
            assert not index.scales[:, 0].any()
            assert (index.means[:, 0] == 3).all()


def test_sixteen_bits_has_no_codes() -> None:
    pool = make_pool()
    with KeyIndex(pool, 16) as index:
        index.append_block(0, 0, 8)
        assert index.num_bytes == 0
        assert index.bytes_per_row == pool.layout.row_bytes / 2
        assert index.codes.size == 0


def test_sizes() -> None:
    pool = make_pool(head_dim=64)
    rows = 2 * 3 * 2 * 8
    for bits, width in ((8, 64), (4, 32), (1, 8)):
        with KeyIndex(pool, bits) as index:
            assert index.codes.shape == (2, 3, 2, 8, width)
            assert index.num_bytes == rows * (width + 4) + 2 * 3 * 2 * 64 * 4
            assert index.num_bytes == rows * index.bytes_per_row
        index.close()


def test_refusals() -> None:
    pool = make_pool()
    with pytest.raises(InvalidOption):
        KeyIndex(pool, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="1024"):
        KeyIndex(HostPool(RowLayout(1, 1, 1025, 1, torch.float32), 1, pin=False), 8)
    with KeyIndex(pool, 8) as index:
        for page, start, count in ((3, 0, 1), (-1, 0, 1), (0, 7, 2), (0, -1, 1)):
            with pytest.raises(UsageError):
                index.append_block(page, start, count)
        with pytest.raises(UsageError, match="0 to 16"):
            index.append_span(np.array([0, 1]), 0, 17)


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 8), st.integers(0, 2**32 - 1))
def test_rotation_keeps_dot_products(log_dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 1 << log_dim
    a, b = rng.standard_normal((2, n)).astype(np.float32)
    signs = key_codes.rotation_signs(n)
    ra, rb = reference.rotate(np.stack([a, b]), signs) / np.float32(np.sqrt(n))
    assert ra @ rb == pytest.approx(a @ b, abs=1e-3)
    fast = a * signs
    key_codes.walsh_hadamard(fast)
    assert np.array_equal(fast, reference.hadamard(a * signs))


def test_signs_are_constant_and_mixed() -> None:
    signs = key_codes.rotation_signs(128)
    assert np.array_equal(signs, key_codes.rotation_signs(128))
    assert 40 < (signs > 0).sum() < 88


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_pack_and_unpack_are_inverse(bits: int) -> None:
    top = {8: 127, 4: 7, 1: 1}[bits]
    codes = np.random.default_rng(0).integers(-top, top + 1, (5, 32)).astype(np.int8)
    codes[codes == 0] = 1
    assert np.array_equal(reference.unpack(reference.pack(codes, bits), bits), codes)


@njit
def _load(rows: np.ndarray, kind: int, out: np.ndarray) -> None:
    load_keys(rows, 0, rows.shape[0], kind, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_widened_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(-1, 16)
    values = bits.view(dtype)
    out = np.empty((values.shape[0], 8), dtype=np.float32)
    _load(as_numpy(values), value_kind(dtype), out)
    expected = values[:, :8].float().numpy()
    finite = ~np.isnan(expected)
    assert np.array_equal(out[finite], expected[finite])
    assert np.isnan(out[~finite]).all()

"""The key index: codes equal to a plain numpy reference, and what they are good for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from herald.errors import InvalidOption, UsageError
from herald.kvstore import HostPool, KeyIndex, RowLayout, key_codes, reference
from herald.kvstore.native import find_native
from herald.kvstore.prefix_file import read_manifest, read_pages, write_prefix
from herald.kvstore.row_values import as_numpy, load_keys, value_kind

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NATIVE = find_native().module
needs_native = pytest.mark.skipif(NATIVE is None, reason=find_native().reason)
BACKENDS = ["numba", pytest.param("native", marks=needs_native)]


def make_pool(head_dim: int = 16, dtype: torch.dtype = torch.float32, pages: int = 3) -> HostPool:
    pool = HostPool(RowLayout(2, 2, head_dim, 8, dtype), pages, pin=False)
    generator = torch.Generator().manual_seed(head_dim)
    values = torch.randn(pool.rows.shape, generator=generator) * 2 + 1
    pool.rows.copy_(values.to(dtype))
    return pool


def expect(pool: HostPool, index: KeyIndex, at: tuple[int, int, int], first_rows: int) -> None:
    """All rows of the page ``at`` are indexed, and its first append had ``first_rows`` of them."""
    keys = pool.rows[at][:, : pool.layout.head_dim].float().numpy()
    rotated = reference.rotate(keys, index.signs)
    mean_codes, mean_scale = reference.mean_codes(rotated[:first_rows])
    assert np.array_equal(index.mean_codes[at], mean_codes)
    assert index.page_scales[at][1] == mean_scale
    mean = reference.decoded_mean(mean_codes, mean_scale)
    centred = rotated - mean
    if index.bits == 8:
        scale = reference.key_scale(centred[:first_rows], mean_scale, mean)
        assert index.page_scales[at][0] == scale
        codes = reference.saturated_codes(centred, scale)
    else:
        codes, scales = reference.quantise(centred, index.bits)
        assert np.array_equal(index.row_scales[at], scales)
    assert np.array_equal(index.codes[at], reference.pack(codes, index.bits))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
def test_codes_equal_the_reference_bit_by_bit(
    bits: int, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    pool = make_pool(head_dim, dtype)
    with KeyIndex(pool, bits, backend=backend) as index:  # type: ignore[arg-type]
        index.append_span(np.array([2, 0], dtype=np.int32), 0, 16)
        for layer in range(2):
            for head in range(2):
                expect(pool, index, (layer, 2, head), 8)
                expect(pool, index, (layer, 0, head), 8)
        assert not any(array[:, 1].any() for array in index.arrays)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("first_rows", [1, 2, 3])
def test_appending_in_pieces_keeps_the_first_mean_and_scale(first_rows: int, bits: int, backend: str) -> None:
    pool = make_pool()
    with KeyIndex(pool, bits, backend=backend) as index:  # type: ignore[arg-type]
        index.append_block(1, 0, first_rows)
        before = index.codes[:, 1, :, :first_rows].copy()
        index.append(0, 1, first_rows, 5 - first_rows)
        index.append(1, 1, first_rows, 5 - first_rows)
        index.append_block(1, 5, 3)
        assert np.array_equal(index.codes[:, 1, :, :first_rows], before)
        for layer in range(2):
            for head in range(2):
                expect(pool, index, (layer, 1, head), first_rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_a_pages_scale_saturate(backend: str) -> None:
    """Later rows a hundred times as large, in both directions, end at the largest codes."""
    pool = make_pool()
    pool.rows[:, 1, :, 4:6] *= 100
    pool.rows[:, 1, :, 6:] *= -100
    with KeyIndex(pool, 8, backend=backend) as index:  # type: ignore[arg-type]
        index.append_block(1, 0, 4)
        index.append_block(1, 4, 4)
        expect(pool, index, (0, 1, 0), 4)
        later = index.codes[:, 1, :, 4:].view(np.int8)
        assert later.min() == -127
        assert later.max() == 127
        first = np.abs(index.codes[:, 1, :, :4].view(np.int8)).max(axis=(2, 3))
        assert (first == np.rint(127 / 1.25 / np.sqrt(5 / 3))).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_spans_in_mid_page_touch_only_their_rows(backend: str) -> None:
    pool = make_pool()
    with KeyIndex(pool, 8, backend=backend) as index:  # type: ignore[arg-type]
        pages = np.array([1, 2], dtype=np.int32)
        index.append_span(pages, 0, 11, layers=(1, 2))
        assert not any(array[0].any() for array in index.arrays)
        assert index.page_scales[1, 1:].all()
        assert index.codes[1, 1].any(axis=2).all()
        assert index.codes[1, 2, :, :3].any(axis=2).all()
        assert not index.codes[1, 2, :, 3:].any()
        index.append_span(pages, 11, 16, layers=(1, 2))
        expect(pool, index, (1, 2, 0), 3)
        index.append_span(pages, 5, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_give_the_same_codes(backend: str) -> None:
    pool = make_pool(pages=7)
    pages = np.random.default_rng(0).permutation(7).astype(np.int32)
    one = KeyIndex(pool, 4, 1, backend="numba")
    many = KeyIndex(pool, 4, 3, backend=backend)  # type: ignore[arg-type]
    with one, many, ThreadPoolExecutor(3) as executor:
        for first, last in ((0, 3), (3, 50)):
            one.append_span(pages, first, last)
            many.append_span(pages, first, last, executor=executor)
        for a, b in zip(one.arrays, many.arrays):
            assert np.array_equal(a, b)


@needs_native
@pytest.mark.parametrize("isa", ["vnni", "avx2", "scalar"])
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("head_dim", [16, 48, 128, 600])
def test_every_instruction_set_gives_the_same_codes(head_dim: int, bits: int, isa: str) -> None:
    """Among them rows of zeros, infinities, NaN and numbers that round to even."""
    assert NATIVE is not None
    if NATIVE.scan_isas().get(isa, isa):
        pytest.skip(f"this CPU has no {isa}")
    pool = make_pool(head_dim, torch.float16)
    pool.rows[0, 0, 0, 3] = 0
    pool.rows[0, 1, 0, 2] = float("inf")
    pool.rows[0, 1, 1, 2] = float("nan")
    pool.rows[1, 0] = pool.rows[1, 0].round()
    pages = np.array([1, 0], dtype=np.int32)
    with KeyIndex(pool, bits, backend="numba") as index:
        index.append_span(pages, 0, 13)
        got = [np.zeros_like(array) for array in index.arrays]
        rows = as_numpy(pool.rows)
        NATIVE.encode(rows, True, *got, index.signs, bits, pages, 0, 13, 0, 2, 2, isa)
        for array, expected in zip(got, index.arrays):
            finite = array == expected
            assert (finite | (np.isnan(array) & np.isnan(expected))).all()


def test_codes_do_not_depend_on_values_rows() -> None:
    pool = make_pool()
    pool.rows[..., 16:] = float("nan")
    with KeyIndex(pool, 8) as index:
        index.append_block(0, 0, 8)
        expect(pool, index, (0, 0, 0), 8)


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.03), (4, 0.25)])
def test_decoded_keys_are_close_despite_an_outlier_channel(bits: int, tolerance: float) -> None:
    pool = make_pool(head_dim=64)
    pool.rows[..., 3] *= 30
    with KeyIndex(pool, bits) as index:
        index.append_block(0, 0, 8)
        rotated = reference.rotate(pool.rows[0, 0, 0, :, :64].numpy(), index.signs) / 8.0
        mean = reference.decoded_mean(index.mean_codes[0, 0, 0], index.page_scales[0, 0, 0, 1]) / 8.0
        codes = reference.unpack(index.codes[0, 0, 0], bits).astype(np.float32)
        scales = index.page_scales[0, 0, 0, :1] if bits == 8 else index.row_scales[0, 0, 0]
        error = np.abs(codes * scales[:, None] + mean - rotated)
        assert error.max() <= tolerance * np.abs(rotated).std() * 2


def test_the_mean_is_exact_to_two_levels() -> None:
    pool = make_pool(head_dim=64)
    pool.rows[..., 3] += 40
    with KeyIndex(pool, 8) as index:
        index.append_block(0, 0, 8)
        rotated = reference.rotate(pool.rows[0, 0, 0, :, :64].numpy(), index.signs)
        mean = reference.decoded_mean(index.mean_codes[0, 0, 0], index.page_scales[0, 0, 0, 1])
        exact = rotated.astype(np.float64).mean(axis=0)
        assert np.abs(mean - exact).max() <= np.abs(exact).max() / (2 * 127 * 128) * 1.01
        assert np.abs(index.mean_codes.astype(np.int32)[..., 1, :]).max() <= 64


def test_equal_keys_give_zero_codes_not_nan() -> None:
    pool = make_pool()
    for value, bits in ((3.0, 8), (3.0, 4), (3.0, 1), (0.0, 8), (0.0, 4), (0.0, 1)):
        pool.rows.fill_(value)
        with KeyIndex(pool, bits) as index:  # type: ignore[arg-type]
            index.append_block(0, 0, 8)
            assert np.isfinite(index.page_scales).all()
            if bits == 8:
                assert (index.page_scales[:, 0, :, 0] > 0).all()
                assert not index.codes[:, 0].any()
            else:
                assert index.row_scales[:, 0].max() <= value * 1e-4
            mean = reference.decoded_mean(index.mean_codes[0, 0, 0], index.page_scales[0, 0, 0, 1])
            back = reference.hadamard(mean[None])[0] * index.signs / 16
            assert np.allclose(back, value, atol=1e-3)


def test_sixteen_bits_has_no_codes() -> None:
    pool = make_pool()
    with KeyIndex(pool, 16) as index:
        index.append_block(0, 0, 8)
        assert index.num_bytes == 0
        assert index.bytes_per_row == pool.layout.row_bytes / 2
        assert index.codes.size == 0


@pytest.mark.parametrize("bits", [8, 16])
def test_whatever_writes_a_page_changes_its_version(bits: int, tmp_path: Path) -> None:
    """Who holds a copy of the codes goes by versions alone; pages that nobody wrote keep theirs."""
    pool, other = make_pool(), make_pool()
    with KeyIndex(pool, bits) as index, KeyIndex(other, bits) as source:  # type: ignore[arg-type]
        pages = np.array([2, 0], dtype=np.int32)
        source.append_span(pages, 0, 16)
        write_prefix(tmp_path / "same", {"index_bits": bits}, np.zeros(16), np.zeros(2), source, pages)
        write_prefix(tmp_path / "others", {"index_bits": 1}, np.zeros(16), np.zeros(2), source, pages)
        for write, written in (
            (lambda: index.append(1, 0, 0, 8), [0]),
            (lambda: index.append_block(2, 0, 4), [2]),
            (lambda: index.append_span(pages, 3, 8), [2]),
            (lambda: index.append_span(pages, 7, 9, (0, 1)), [0, 2]),
            (lambda: index.copy_pages(source, 0, slice(0, 1), slice(1, 2)), [1]),
            (lambda: read_pages(read_manifest(tmp_path / "same"), index, pages), [0, 2]),
            (lambda: read_pages(read_manifest(tmp_path / "others"), index, pages), [0, 2]),
        ):
            before = index.versions.copy()
            write()
            changed = np.flatnonzero(index.versions != before).tolist()
            assert changed == (written if bits == 8 else [])


def test_sizes() -> None:
    pool = make_pool(head_dim=64)
    rows = 2 * 3 * 2 * 8
    for bits, width in ((8, 64), (4, 32), (1, 8)):
        with KeyIndex(pool, bits) as index:
            assert index.codes.shape == (2, 3, 2, 8, width)
            assert index.row_scales.shape == (2, 3, 2, 0 if bits == 8 else 8)
            assert index.mean_codes.shape == (2, 3, 2, 2, 64)
            assert index.page_scales.shape == (2, 3, 2, 2)
            of_row = width if bits == 8 else width + 4
            assert index.num_bytes == rows * of_row + 2 * 3 * 2 * (2 * 64 + 2 * 4)
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
        with pytest.raises(UsageError, match="0 to 2"):
            index.append_span(np.array([0, 3]), 0, 16)


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

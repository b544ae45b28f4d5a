"""Key codes: rotate, centre, quantise. nogil numba, with a fixed order of every float operation.

A key k of a page becomes codes c and a scale s, beside the page's mean m, such that

    R k  ~  m + c * s,      R = H diag(signs) / sqrt(n)

with H the Walsh-Hadamard matrix of order n (head_dim padded to a power of two) and constant random signs.
The rotation spreads outlier channels over all dimensions before one scale serves a whole row or page (the
idea of QuaRot, arXiv 2404.00456, section 3, and RaBitQ, arXiv 2405.12497, section 3). R keeps dot products,
so a rotated query meets mean and codes directly: q.k ~ (R q).m + s * (R q).c.

The mean is that of the rotated rows appended with ``start == 0``, in two levels of int8:
m = mean_scale * (128 * high + low). Rows are centred by this m, so its rounding costs nothing.

With 8 bits one scale serves a page: that of the rows appended with ``start == 0``, with room for later ones.
Of c rows, MARGIN * sqrt((c + 1) / (c - 1)) times the largest |rotated, centred value| is code 127 (the root
is how much farther from the mean of c rows a later row lies than those c do). What exceeds that saturates
at -127 or 127. With 4 and 1 bits every row has a scale of its own.

Layout of one row's codes, W = n * bits / 8 bytes:
    8 bits: byte i holds dimension i, two's complement, -127 .. 127.
    4 bits: the low half of byte i holds dimension i, the high half dimension i + n/2, value + 8, -7 .. 7.
    1 bit:  bit j of byte i holds dimension j * W + i, 1 for a value >= 0.
"""

from __future__ import annotations

import numpy as np

from herald.jit import jit
from herald.kvstore.row_values import load_keys
from herald.kvstore.vectors import butterfly, hadamard_16

# Any constant will do; the codes of a checkpoint's keys depend on it, so it never changes.
_SIGN_SEED = 20240613
# Below this a row is all zero for our purposes, and 127 / max would overflow.
SMALLEST_MAXIMUM = np.float32(1e-30)
SUM_LANES = 8
# What the largest code of a mean stands for: 127 * 128 + 0.
MEAN_TOP = np.float32(127 * 128)
MARGIN = np.float32(1.25)
# A page's key scale in units of its mean scale, at least: |q.m| then stays below 2 ** 29 key units.
LEAST_RATIO = np.float32(4)


def padded_dim(head_dim: int) -> int:
    """Dimensions of a rotated key: the next power of two, at least 16 (one vector)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def code_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one row's codes (0 for 16 bits, where the pool itself is scanned)."""
    return 0 if bits == 16 else padded_dim(head_dim) * bits // 8


def rotation_signs(head_dim: int) -> np.ndarray:
    """The constant signs of the rotation, float32 [padded_dim]."""
    rng = np.random.Generator(np.random.PCG64(_SIGN_SEED))
    return np.where(rng.random(padded_dim(head_dim)) < 0.5, np.float32(-1), np.float32(1))


@jit
def walsh_hadamard(x: np.ndarray) -> None:
    """Walsh-Hadamard transform in place, without its 1/sqrt(n). ``x`` [n] float32, n a power of two >= 16.

    Partners are n/2, n/4 ... 1 apart; the element with the lower index gets the sum.
    """
    step = x.size // 2
    while step >= 16:
        for start in range(0, x.size, 2 * step):
            for i in range(start, start + step, 16):
                butterfly(x, i, i + step)
        step //= 2
    for i in range(0, x.size, 16):
        hadamard_16(x, i)


@jit
def largest_magnitude(x: np.ndarray) -> np.float32:
    """max |x|. Compares bit patterns as integers, which vectorises without relaxed float rules."""
    bits = x.view(np.uint32)
    largest = np.zeros(1, dtype=np.uint32)
    running = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        running = magnitude if magnitude > running else running
    largest[0] = running
    return largest.view(np.float32)[0]


@jit
def _sum_of_magnitudes(x: np.ndarray) -> np.float32:
    """sum |x| in float32: lane j adds x[j], x[j + 8], ... in order; then lanes 0 .. 7 are added in order."""
    lanes = np.zeros(SUM_LANES, dtype=np.float32)
    for i in range(0, x.size, SUM_LANES):
        for j in range(SUM_LANES):
            lanes[j] += abs(x[i + j])
    total = np.float32(0)
    for j in range(SUM_LANES):
        total += lanes[j]
    return total


@jit
def pack_8(x: np.ndarray, inverse: np.float32, codes: np.ndarray) -> None:
    """``codes`` [n] uint8 = rint(x * inverse) as int8, saturated at -127 and 127; NaN becomes 127."""
    for i in range(x.size):
        value = x[i] * inverse
        value = value if value < np.float32(127) else np.float32(127)
        value = value if value > np.float32(-127) else np.float32(-127)
        codes[i] = np.uint8(np.int8(np.int32(np.rint(value))))


@jit
def _pack_4(x: np.ndarray, inverse: np.float32, codes: np.ndarray) -> None:
    half = x.size // 2
    for i in range(half):
        low = np.int32(np.rint(x[i] * inverse)) + np.int32(8)
        high = np.int32(np.rint(x[i + half] * inverse)) + np.int32(8)
        codes[i] = np.uint8(low | (high << 4))


@jit
def _pack_1(x: np.ndarray, codes: np.ndarray) -> None:
    width = codes.size
    for i in range(width):
        codes[i] = 0
    for j in range(8):
        for i in range(width):
            bit = np.uint8(1) if x[j * width + i] >= np.float32(0) else np.uint8(0)
            codes[i] |= np.uint8(bit << j)


@jit
def _quantise(x: np.ndarray, bits: int, norm: np.float32, codes: np.ndarray) -> np.float32:
    """4-bit or 1-bit codes of an unnormalised rotated row ``x`` [n]; returns its scale.

    4 bits: scale = (max|x| * norm) / 7, code = rint(x * (7 / max|x|)), ties to even. 1 bit:
    scale = (sum|x| / n) * norm. ``norm`` = 1/sqrt(n) is left out of the codes, which it does not change.
    """
    if bits == 1:
        _pack_1(x, codes)
        return (_sum_of_magnitudes(x) / np.float32(x.size)) * norm
    top = np.float32(7)
    largest = largest_magnitude(x)
    inverse = np.float32(0)
    scale = np.float32(0)
    if largest >= SMALLEST_MAXIMUM:
        inverse = top / largest
        scale = (largest * norm) / top
    _pack_4(x, inverse, codes)
    return scale


@jit
def rotate(values: np.ndarray, signs: np.ndarray, x: np.ndarray) -> None:
    """``x`` [n] = the unnormalised rotation of ``values`` [D]."""
    for d in range(values.size):
        x[d] = values[d] * signs[d]
    for d in range(values.size, x.size):
        x[d] = np.float32(0)
    walsh_hadamard(x)


@jit
def _fix_mean(x: np.ndarray, norm: np.float32, mean_codes: np.ndarray) -> np.float32:
    """Codes [2, n] int8 of the mean of the rotated rows ``x`` [count, n]; returns its scale."""
    count, n = x.shape
    mean = np.zeros(n, dtype=np.float32)
    for r in range(count):
        for d in range(n):
            mean[d] += x[r, d]
    for d in range(n):
        mean[d] /= np.float32(count)
    largest = largest_magnitude(mean)
    inverse = np.float32(0)
    scale = np.float32(0)
    if largest >= SMALLEST_MAXIMUM:
        inverse = MEAN_TOP / largest
        scale = (largest * norm) / MEAN_TOP
    for d in range(n):
        value = mean[d] * inverse
        value = value if value < MEAN_TOP else MEAN_TOP
        value = value if value > -MEAN_TOP else -MEAN_TOP
        whole = np.int32(np.rint(value))
        high = np.int32((whole + np.int32(64)) >> np.int32(7))
        mean_codes[0, d] = np.int8(high)
        mean_codes[1, d] = np.int8(whole - np.int32(128) * high)
    return scale


@jit
def _key_scale(x: np.ndarray, norm: np.float32, mean_scale: np.float32, mean: np.ndarray) -> np.float32:
    """The scale of a page's 8-bit codes, from its first rows, rotated and centred, ``x`` [count, n]."""
    count = x.shape[0]
    largest = largest_magnitude(x.reshape(-1))
    spread = np.float32(1)
    if count == 1:  # it is its own mean, and says nothing about how far others lie from it
        largest = largest_magnitude(mean)
    else:
        spread = np.sqrt(np.float32(count + 1) / np.float32(count - 1))
    scale = (((largest * MARGIN) * spread) * norm) / np.float32(127)
    least = mean_scale * LEAST_RATIO
    scale = scale if scale > least else least
    return scale if scale >= SMALLEST_MAXIMUM else np.float32(1)


@jit
def encode_rows(
    rows: np.ndarray,
    start: int,
    count: int,
    kind: int,
    bits: int,
    signs: np.ndarray,
    codes: np.ndarray,
    row_scales: np.ndarray,
    mean_codes: np.ndarray,
    page_scales: np.ndarray,
) -> None:
    """Build codes of rows ``start .. start + count`` of one page of one layer and head.

    Args:
        rows: [page_size, 2 * D] float32, or uint16 for the 16-bit kinds.
        codes: [page_size, W] uint8; row_scales: [page_size] float32, not used with 8 bits. Written in place.
        mean_codes: [2, n] int8, high and low; page_scales: [2] float32, key scale (8 bits only) and mean
            scale. Written only when ``start`` is 0, and read when it is not.
    """
    n = signs.size
    head_dim = rows.shape[1] // 2
    keys = np.empty((count, head_dim), dtype=np.float32)
    load_keys(rows, start, count, kind, keys)
    norm = np.float32(1.0 / np.sqrt(n))
    x = np.empty((count, n), dtype=np.float32)
    for r in range(count):
        rotate(keys[r], signs, x[r])
    if start == 0:
        page_scales[1] = _fix_mean(x, norm, mean_codes)
    step = page_scales[1] / norm
    mean = np.empty(n, dtype=np.float32)
    for d in range(n):
        whole = np.int32(mean_codes[0, d]) * np.int32(128) + np.int32(mean_codes[1, d])
        mean[d] = np.float32(whole) * step
    for r in range(count):
        for d in range(n):
            x[r, d] -= mean[d]
    if bits == 8:
        if start == 0:
            page_scales[0] = _key_scale(x, norm, page_scales[1], mean)
        inverse = np.divide(norm, page_scales[0])  # the operator would raise for a page never begun
        for r in range(count):
            pack_8(x[r], inverse, codes[start + r])
        return
    for r in range(count):
        row_scales[start + r] = _quantise(x[r], bits, norm, codes[start + r])


@jit
def encode_span(
    rows: np.ndarray,
    layer_range: tuple[int, int],
    page_ids: np.ndarray,
    first: int,
    last: int,
    kind: int,
    bits: int,
    signs: np.ndarray,
    codes: np.ndarray,
    row_scales: np.ndarray,
    mean_codes: np.ndarray,
    page_scales: np.ndarray,
) -> None:
    """Build codes of positions ``first .. last`` of a request, for all heads of a range of layers.

    ``page_ids`` [np] int32 are the request's pages in order of position; arrays are those of the whole
    pool and index: rows [L, P, H, page_size, 2D], and those of `KeyIndex`.
    """
    num_heads, page_size = codes.shape[2], codes.shape[3]
    for layer in range(layer_range[0], layer_range[1]):
        for block in range(first // page_size, (last + page_size - 1) // page_size):
            page = page_ids[block]
            start = max(0, first - block * page_size)
            stop = min(page_size, last - block * page_size)
            for head in range(num_heads):
                encode_rows(
                    rows[layer, page, head],
                    start,
                    stop - start,
                    kind,
                    bits,
                    signs,
                    codes[layer, page, head],
                    row_scales[layer, page, head],
                    mean_codes[layer, page, head],
                    page_scales[layer, page, head],
                )

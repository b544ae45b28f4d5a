"""Key codes in plain numpy, one operation a line: what `key_codes` must give, bit by bit."""

from __future__ import annotations

import numpy as np

from herald.kvstore.key_codes import LEAST_RATIO, MARGIN, MEAN_TOP, SMALLEST_MAXIMUM, SUM_LANES


def hadamard(x: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard transform of the last dimension (a power of two), without its 1/sqrt(n)."""
    n = x.shape[-1]
    step = n // 2
    while step >= 1:
        pairs = x.reshape(*x.shape[:-1], n // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step //= 2
    return x


def rotate(values: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Unnormalised rotation of rows [count, D] -> [count, n]."""
    padded = np.zeros((len(values), signs.size), dtype=np.float32)
    padded[:, : values.shape[1]] = values * signs[: values.shape[1]]
    return hadamard(padded)


def _norm(n: int) -> np.float32:
    return np.float32(1.0 / np.sqrt(n))


def _steps(largest: np.ndarray, top: np.float32, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(1 / unnormalised step, normalised step) that bring ``largest`` to ``top``; 0 where all is 0."""
    usable = largest >= SMALLEST_MAXIMUM
    inverse = np.where(usable, top / np.where(usable, largest, np.float32(1)), np.float32(0))
    scale = np.where(usable, (largest * _norm(n)) / top, np.float32(0))
    return inverse.astype(np.float32), scale.astype(np.float32)


def quantise(rotated: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes int8 [count, n], one a dimension; scales float32 [count]) of rotated rows: 4 bits or 1."""
    n = rotated.shape[1]
    magnitude = np.abs(rotated)
    if bits == 1:
        codes = np.where(rotated >= 0, 1, -1).astype(np.int8)
        lanes = np.zeros((len(rotated), SUM_LANES), dtype=np.float32)
        for part in np.split(magnitude, n // SUM_LANES, axis=1):
            lanes += part
        total = np.zeros(len(rotated), dtype=np.float32)
        for lane in lanes.T:
            total += lane
        return codes, (total / np.float32(n)) * _norm(n)
    inverse, scales = _steps(magnitude.max(axis=1), np.float32(7), n)
    return np.rint(rotated * inverse[:, None]).astype(np.int8), scales


def quantise_together(rotated: np.ndarray, counting: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """8-bit (codes int8 [count, n], scale) of rotated rows that share the scale of ``counting`` ones."""
    largest = np.abs(rotated[counting]).max(initial=np.float32(0))
    inverse, scale = _steps(largest, np.float32(127), rotated.shape[1])
    return np.rint(np.clip(rotated * inverse, -127, 127)).astype(np.int8), np.float32(scale)


def mean_codes(rotated: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(high and low codes int8 [2, n], scale) of the mean of rotated rows, added in order in float32."""
    total = np.zeros(rotated.shape[1], dtype=np.float32)
    for row in rotated:
        total += row
    mean = total / np.float32(len(rotated))
    inverse, scale = _steps(np.abs(mean).max(), MEAN_TOP, len(mean))
    whole = np.rint(np.clip(mean * inverse, -MEAN_TOP, MEAN_TOP)).astype(np.int32)
    high = (whole + 64) // 128
    return np.stack([high, whole - 128 * high]).astype(np.int8), np.float32(scale)


def decoded_mean(codes: np.ndarray, scale: np.float32) -> np.ndarray:
    """The unnormalised rotated mean [n] that codes [2, n] stand for."""
    whole = codes[0].astype(np.int32) * 128 + codes[1]
    return whole.astype(np.float32) * (scale / _norm(codes.shape[1]))


def key_scale(centred: np.ndarray, mean_scale: np.float32, mean: np.ndarray) -> np.float32:
    """The scale of a page's 8-bit codes from its first rows, rotated and centred."""
    count, n = centred.shape
    if count == 1:
        largest, spread = np.abs(mean).max(), np.float32(1)
    else:
        largest, spread = np.abs(centred).max(), np.sqrt(np.float32(count + 1) / np.float32(count - 1))
    scale = (((largest * MARGIN) * spread) * _norm(n)) / np.float32(127)
    scale = max(scale, mean_scale * LEAST_RATIO)
    return scale if scale >= SMALLEST_MAXIMUM else np.float32(1)


def saturated_codes(centred: np.ndarray, scale: np.float32) -> np.ndarray:
    """8-bit codes int8 [count, n] of rotated and centred rows of a page with that scale."""
    inverse = _norm(centred.shape[1]) / scale
    return np.rint(np.clip(centred * inverse, -127, 127)).astype(np.int8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """int8 codes [count, n], one a dimension -> the index's bytes [count, n * bits / 8]."""
    count, n = codes.shape
    if bits == 8:
        return codes.view(np.uint8)
    if bits == 4:
        nibbles = (codes + 8).astype(np.uint8)
        return nibbles[:, : n // 2] | (nibbles[:, n // 2 :] << 4)
    ones = (codes > 0).astype(np.uint8).reshape(count, 8, n // 8)
    return np.bitwise_or.reduce(ones << np.arange(8, dtype=np.uint8)[:, None], axis=1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`."""
    if bits == 8:
        return packed.view(np.int8)
    if bits == 4:
        return (np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int16) - 8).astype(np.int8)
    ones = (packed[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (2 * ones.astype(np.int8) - 1).reshape(len(packed), -1)

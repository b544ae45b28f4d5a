"""Key codes in plain numpy, one operation a line: what `key_codes` must give, bit by bit."""

from __future__ import annotations

import numpy as np

from herald.kvstore.key_codes import SMALLEST_MAXIMUM, SUM_LANES


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


def page_mean(keys: np.ndarray) -> np.ndarray:
    """Mean over rows [count, D] -> [D], added in order in float32."""
    total = np.zeros(keys.shape[1], dtype=np.float32)
    for row in keys:
        total += row
    return total / np.float32(len(keys))


def rotate(values: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Unnormalised rotation of rows [count, D] -> [count, n]."""
    padded = np.zeros((len(values), signs.size), dtype=np.float32)
    padded[:, : values.shape[1]] = values * signs[: values.shape[1]]
    return hadamard(padded)


def quantise(rotated: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes int8 [count, n], one a dimension; scales float32 [count]) of unnormalised rotated rows."""
    n = rotated.shape[1]
    norm = np.float32(1.0 / np.sqrt(n))
    magnitude = np.abs(rotated)
    if bits == 1:
        codes = np.where(rotated >= 0, 1, -1).astype(np.int8)
        lanes = np.zeros((len(rotated), SUM_LANES), dtype=np.float32)
        for part in np.split(magnitude, n // SUM_LANES, axis=1):
            lanes += part
        total = np.zeros(len(rotated), dtype=np.float32)
        for lane in lanes.T:
            total += lane
        return codes, (total / np.float32(n)) * norm
    top = np.float32(127 if bits == 8 else 7)
    largest = magnitude.max(axis=1)
    usable = largest >= SMALLEST_MAXIMUM
    inverse = np.where(usable, top / np.where(usable, largest, np.float32(1)), np.float32(0))
    scales = np.where(usable, (largest * norm) / top, np.float32(0))
    codes = np.rint(rotated * inverse[:, None].astype(np.float32)).astype(np.int8)
    return codes, scales.astype(np.float32)


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

"""Log of a sum of exponentials in a fixed order of float operations. nogil numba."""

from __future__ import annotations

import numpy as np

from herald.jit import jit


@jit
def exp_in_place(x: np.ndarray, bits: np.ndarray) -> None:
    """exp of ``x`` <= 0 in place, float32, relative error below 3e-7: n ln 2 + r, then a polynomial in r.

    Coefficients are those of the Cephes library's expf. ``bits`` is scratch, int32, as long as ``x``.
    """
    for i in range(x.size):
        v = max(x[i], np.float32(-87.0))
        n = np.rint(v * np.float32(1.44269504))
        r = v - n * np.float32(0.693359375)
        r = r - n * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        x[i] = p * (r * r) + r + np.float32(1.0)
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(x.size):
        x[i] *= powers[i]


@jit
def _sum_in_lanes(x: np.ndarray) -> np.float32:
    lanes = x[:16]
    for start in range(16, x.size, 16):
        part = x[start : start + 16]
        for i in range(lanes.size):
            lanes[i] += part[i]
    total = np.float32(0)
    for i in range(16):
        total += lanes[i]
    return total


@jit
def log_of_sum(row: np.ndarray, largest: np.float32, bits: np.ndarray) -> np.float32:
    """Log of the sum of exp over scores ``row`` whose largest is given. Overwrites ``row``."""
    for q in range(row.size):
        row[q] -= largest
    exp_in_place(row, bits)
    return np.float32(np.float64(largest) + np.log(np.float64(_sum_in_lanes(row))))

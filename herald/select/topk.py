"""Top k of a score row by threshold: three histogram passes over float bits, no sort."""

from __future__ import annotations

import numpy as np

from herald.jit import jit

_BINS = 2048


@jit
def _order_bits(scores: np.ndarray, keys: np.ndarray) -> None:
    """Float bits as uint32 that compare like the floats; NaN is below everything, -0 equals +0."""
    bits = scores.view(np.uint32)
    for i in range(bits.size):
        u = np.uint32(bits[i])
        magnitude = np.uint32(u & np.uint32(0x7FFFFFFF))
        key = (
            np.uint32(~u)
            if u != magnitude and magnitude != np.uint32(0)
            else np.uint32(magnitude | np.uint32(0x80000000))
        )
        keys[i] = np.uint32(0) if magnitude > np.uint32(0x7F800000) else key


@jit
def _find_bin(histogram: np.ndarray, rank: int) -> tuple[int, int]:
    """Bin of the ``rank``-th largest entry (from 1), and its rank among the entries of that bin."""
    b = histogram.size - 1
    while b > 0 and rank > histogram[b]:
        rank -= histogram[b]
        b -= 1
    return b, rank


@jit
def _threshold(keys: np.ndarray, k: int, histogram: np.ndarray) -> tuple[np.uint32, int]:
    """The k-th largest key, and how many keys equal to it are among the k largest."""
    prefix = np.uint32(0)
    rank = k
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        top = np.uint32(shift + width)
        low = np.uint32(shift)
        mask = np.uint32((1 << width) - 1)
        histogram.fill(0)
        if shift == 21:
            for i in range(keys.size):
                histogram[keys[i] >> low] += 1
        else:
            for i in range(keys.size):
                if keys[i] >> top == prefix:
                    histogram[(keys[i] >> low) & mask] += 1
        chosen, rank = _find_bin(histogram[: 1 << width], rank)
        prefix = np.uint32((prefix << np.uint32(width)) | np.uint32(chosen))
    return prefix, rank


@jit
def top_k(
    scores: np.ndarray, k: int, first: int, keys: np.ndarray, histogram: np.ndarray, out: np.ndarray
) -> None:
    """Positions of the k highest scores, ascending; equal scores: the lower position wins.

    Args:
        scores: [n] float32; NaN counts as lower than every number.
        k: 1 .. n.
        first: position of ``scores[0]``.
        keys: [>= n] uint32, histogram: [2048] int32: scratch.
        out: [k] int32.
    """
    n = scores.size
    _order_bits(scores, keys[:n])
    threshold, ties = _threshold(keys[:n], k, histogram)
    taken = 0
    i = 0
    while taken < k and i < n:
        equal = keys[i] == threshold
        take = keys[i] > threshold or (equal and ties > 0)
        out[taken] = first + i
        taken += take
        ties -= equal
        i += 1


def scratch(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays that `top_k` needs for ``n`` scores."""
    return np.empty(n, dtype=np.uint32), np.empty(_BINS, dtype=np.int32)

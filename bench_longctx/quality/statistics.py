"""Intervals: of a share, and of the difference between two methods on the same documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.96
RESAMPLES = 2000
# Fewer have no bootstrap interval: resamples of one document are all alike, those of a few nearly.
LEAST_DOCUMENTS = 10


def wilson(right: int, of: int, z: float = Z) -> tuple[float, float]:
    """95% interval of a share (Wilson's score interval)."""
    if of == 0:
        return 0.0, 1.0
    share = right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def paired_shares(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float, float]:
    """(difference, low, high) of the shares right, first - second, on the same documents.

    The 95% interval is Newcombe's square-and-add of two Wilson intervals for paired data (Statistics in
    Medicine 17, 1998, pp. 2635-2650, method 10). It has a width also where no document differs.

    Raises:
        ValueError: the sequences differ in length, or are empty.
    """
    of = len(first)
    if of == 0 or of != len(second):
        raise ValueError(f"{of} and {len(second)} documents cannot be paired")
    both = sum(a and b for a, b in zip(first, second))
    only_first, only_second = sum(first) - both, sum(second) - both
    neither = of - both - only_first - only_second
    p, q = sum(first) / of, sum(second) / of
    (low_p, high_p), (low_q, high_q) = wilson(sum(first), of), wilson(sum(second), of)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    cross: float = both * neither - only_first * only_second
    if cross > 0:
        cross = max(cross - of / 2, 0.0)
    phi = cross / math.sqrt(margins) if margins else 0.0

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p - q, p - q - distance(p - low_p, high_q - q), p - q + distance(high_p - p, q - low_q)


def paired_means(
    first: Sequence[float], second: Sequence[float], seed: int = 0
) -> tuple[float, float | None, float | None]:
    """(difference, low, high) of the mean scores, first - second, on the same documents.

    The 95% interval is the bootstrap's: percentiles of 2,000 resamples of the documents, seeded. None and
    None where there are fewer than `LEAST_DOCUMENTS`.

    Raises:
        ValueError: the sequences differ in length, or are empty.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} documents cannot be paired")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if len(differences) < LEAST_DOCUMENTS:
        return float(differences.mean()), None, None
    picks = np.random.default_rng(seed).integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.percentile(differences[picks].mean(axis=1), [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)

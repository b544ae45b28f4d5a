"""Intervals against published and hand-worked values."""

from __future__ import annotations

import pytest

from bench_longctx.quality.statistics import LEAST_DOCUMENTS, paired_means, paired_shares, wilson


def test_wilson():
    # 81 of 263: 0.2553 to 0.3662 (Newcombe 1998, Statistics in Medicine 17, pp. 857-872, table I, method 3)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == pytest.approx(1)
    assert wilson(0, 0) == (0, 1)


def pairs(both: int, first: int, second: int, neither: int) -> tuple[list[bool], list[bool]]:
    a = [True] * both + [True] * first + [False] * second + [False] * neither
    b = [True] * both + [False] * first + [True] * second + [False] * neither
    return a, b


@pytest.mark.parametrize(
    "counts, expected",
    [
        # by hand: phi = 0 where a margin is empty
        ((36, 12, 2, 0), (0.2, 0.0569, 0.3404)),
        ((0, 0, 0, 10), (0.0, -0.2775, 0.2775)),
        ((10, 0, 0, 0), (0.0, -0.2775, 0.2775)),
    ],
)
def test_paired_shares(counts, expected):
    assert paired_shares(*pairs(*counts)) == pytest.approx(expected, abs=5e-4)


def test_paired_shares_are_antisymmetric_and_narrower_for_like_documents():
    a, b = pairs(80, 6, 2, 12)
    there, low, high = paired_shares(a, b)
    back, low_back, high_back = paired_shares(b, a)
    assert (there, low, high) == pytest.approx((-back, -high_back, -low_back))
    shuffled = paired_shares(a, b[::-1])
    assert high - low < shuffled[2] - shuffled[1]


def test_paired_means():
    first, second = [1.0, 0.5, 1.0, 0.0] * 10, [0.5, 0.5, 0.5, 0.0] * 10
    difference, low, high = paired_means(first, second)
    assert difference == pytest.approx(0.25)
    assert 0.15 < low < 0.25 < high < 0.35
    assert paired_means(first, second) == (difference, low, high)
    assert paired_means(first, first) == (0, 0, 0)


@pytest.mark.parametrize("count", range(1, 12))
def test_few_documents_have_no_bootstrap_interval(count: int):
    """All resamples of one document are that document: an interval without width would say it is certain."""
    difference, low, high = paired_means([0.95] * count, [1.0] * count)
    assert difference == pytest.approx(-0.05)
    assert (low is None) == (high is None) == (count < LEAST_DOCUMENTS)


def test_what_cannot_be_paired():
    with pytest.raises(ValueError, match="2 and 1 documents"):
        paired_shares([True, False], [True])
    with pytest.raises(ValueError, match="0 and 0 documents"):
        paired_means([], [])

"""Quotas of a block's steps."""

from __future__ import annotations

import pytest

from herald.decode import quota
from herald.errors import InvalidOption


@pytest.mark.parametrize(
    ("block_length", "steps", "expected"),
    [
        (4, 4, [1, 1, 1, 1]),
        (4, 2, [2, 2]),
        (4, 3, [2, 1, 1]),
        (8, 3, [3, 3, 2]),
        (4, 1, [4]),
        (4, 0, [1, 1, 1, 1]),
        (2, 5, [1, 1]),
        (4, 10**12, [1, 1, 1, 1]),
    ],
)
def test_values(block_length: int, steps: int, expected: list[int]) -> None:
    assert quota(block_length, steps) == expected


@pytest.mark.parametrize("block_length", [1, 4, 32, 64])
def test_quotas_add_up_and_never_grow(block_length: int) -> None:
    for steps in range(1, 70):
        shares = quota(block_length, steps)
        assert len(shares) == min(steps, block_length) and sum(shares) == block_length
        assert sorted(shares, reverse=True) == shares and shares[0] - shares[-1] <= 1


@pytest.mark.parametrize(
    ("block_length", "steps", "field"), [(0, 1, "block_length"), (4, -1, "denoising_steps")]
)
def test_refusals(block_length: int, steps: int, field: str) -> None:
    with pytest.raises(InvalidOption, match=field):
        quota(block_length, steps)

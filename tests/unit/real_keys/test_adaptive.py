"""Set sizes per head: equal totals, and the rules against an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch

from bench_longctx.real_keys.adaptive import RULES, allocate, equal_share, uniform, water_filling


def curves(heads: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Estimated shares [heads, rows + 1] of heads whose mass is spread unevenly."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.arange(1, heads + 1)[:, None] * 2.0
    mass = (torch.rand(heads, rows, generator=generator, dtype=torch.float64) ** power).sort(-1, True).values
    held = torch.cat((torch.zeros(heads, 1, dtype=torch.float64), mass.cumsum(-1)), -1)
    return held / held[:, -1:]


def gained(held: torch.Tensor, counts: torch.Tensor) -> float:
    return held.gather(1, counts[:, None]).sum().item()


@pytest.mark.parametrize("total", [0, 1, 7, 12, 18])
def test_water_filling_is_optimal(total):
    held = curves(3, 6)
    counts = water_filling(held, total)
    assert counts.sum() == total
    best = max(
        gained(held, torch.tensor(c)) for c in itertools.product(range(7), repeat=3) if sum(c) == total
    )
    assert gained(held, counts) == pytest.approx(best)


@pytest.mark.parametrize("total", [0, 5, 40, 100, 200])
def test_equal_share_is_the_largest_share_that_fits(total):
    held = curves(4, 50)
    counts = equal_share(held, total)
    assert counts.sum() <= total
    reached = held.gather(1, counts[:, None])
    if total == 200:
        assert reached.min() > 1 - 1e-9
        return
    # A head that had one row less would hold less than what the worst head holds.
    less = held.gather(1, (counts - 1).clamp(min=0)[:, None])
    assert (less[counts > 0] <= reached.min() + 1e-9).all()
    more = [(row >= reached.min() + 0.02).nonzero()[0].item() for row in held]
    assert sum(more) > total


def test_uniform_and_scopes():
    held = torch.stack([curves(2, 40, seed) for seed in range(3)])
    assert allocate(held, 7, "uniform", False).tolist() == [[7, 7]] * 3
    assert uniform(held[0], 14).tolist() == [7, 7]
    for rule in RULES:
        within = allocate(held, 7, rule, False)
        across = allocate(held, 7, rule, True)
        assert within.shape == across.shape == (3, 2)
        assert (within.sum(1) <= 14).all()
        assert across.sum() <= 42
    sums = [
        held.gather(2, allocate(held, 7, "water-filling", scope)[..., None]).sum() for scope in (False, True)
    ]
    assert sums[1] >= sums[0] >= held[..., 7].sum()

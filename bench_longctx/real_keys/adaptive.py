"""Set sizes per head at an equal total: more rows where the mass is spread, fewer where it is not."""

from __future__ import annotations

import torch


def uniform(held: torch.Tensor, total: int) -> torch.Tensor:
    """The same number of rows for every head: int64 [heads]. ``held`` as below."""
    heads = len(held)
    return torch.full((heads,), total // heads, dtype=torch.int64)


def water_filling(held: torch.Tensor, total: int) -> torch.Tensor:
    """Rows go, one by one, to the head that gains most estimated share from its next one.

    That is optimal for the sum of shares, as what a head gains only falls.

    Args:
        held: float64 [heads, R + 1], estimated share that a head's best 0 ... R rows hold.
        total: rows to hand out, at most heads * R.

    Returns:
        int64 [heads], rows of each head, ``total`` in all.
    """
    gains = held.diff(dim=-1)
    taken = torch.sort(gains.flatten(), descending=True, stable=True).indices[:total]
    return torch.bincount(taken // gains.shape[1], minlength=len(held))


def equal_share(held: torch.Tensor, total: int) -> torch.Tensor:
    """Each head gets the fewest rows that hold a share p of its estimated mass, with the largest p that fits.

    Arguments and result as for `water_filling`; up to one row a head of the total may stay unused.
    """
    low, high = 0.0, 1.0
    counts = torch.zeros(len(held), dtype=torch.int64)
    for _ in range(50):
        share = (low + high) / 2
        wanted = torch.searchsorted(held.contiguous(), torch.full((len(held), 1), share, dtype=held.dtype))
        wanted = wanted.squeeze(1).clamp(max=held.shape[1] - 1)
        if int(wanted.sum()) <= total:
            low, counts = share, wanted
        else:
            high = share
    return counts


RULES = {"uniform": uniform, "share p": equal_share, "water-filling": water_filling}


def allocate(held: torch.Tensor, rows: int, rule: str, over_layers: bool) -> torch.Tensor:
    """Rows of every head, int64 [L, H], with ``rows`` a head on average.

    Args:
        held: float64 [L, H, R + 1], as in `water_filling`.
        over_layers: one total for all layers; else one for each layer.
    """
    layers, heads = held.shape[:2]
    if over_layers:
        return RULES[rule](held.flatten(0, 1), rows * layers * heads).view(layers, heads)
    return torch.stack([RULES[rule](layer, rows * heads) for layer in held])

"""Collects the shares of a method over blocks and sums them up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


def index_label(bits: int, operator: str) -> str:
    """How a set chosen by the runtime's index is called."""
    return f"{bits} bit{'s' if bits > 1 else ''}, {operator}"


@dataclass
class Method:
    """What is measured of one way to choose rows.

    Attributes:
        group: part of the table.
        label: its row.
        shares: by budget, one float64 [L, H] a block: share of the prefix mass that the set holds.
        relative: the same over the best set's share.
    """

    group: str
    label: str
    shares: dict[float, list[torch.Tensor]] = field(default_factory=dict)
    relative: dict[float, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, budget: float, share: torch.Tensor, best: torch.Tensor) -> None:
        self.shares.setdefault(budget, []).append(share)
        self.relative.setdefault(budget, []).append(share / best)

    def summary(self) -> dict[str, Any]:
        """Mean and 10th percentile over layers, KV heads and blocks, by budget (see `spread_of`)."""
        cells: dict[str, dict[str, float]] = {}
        for budget, shares in self.shares.items():
            share, share_p10 = spread_of(shares)
            relative, relative_p10 = spread_of(self.relative[budget])
            cells[f"{budget:g}"] = {
                "share": share,
                "share_p10": share_p10,
                "relative": relative,
                "relative_p10": relative_p10,
            }
        return {"group": self.group, "label": self.label, "budgets": cells}


def spread_of(values: list[torch.Tensor]) -> tuple[float, float]:
    """Mean and 10th percentile of all values, to 5 decimals."""
    flat = torch.stack(values).flatten()
    return round(flat.mean().item(), 5), round(flat.quantile(0.1).item(), 5)


class Tally:
    """Methods in the order in which they first report."""

    def __init__(self) -> None:
        self.methods: dict[tuple[str, str], Method] = {}

    def add(
        self, group: str, label: str, budget: float, share: torch.Tensor, best: torch.Tensor | None = None
    ) -> None:
        """Add one block: ``share`` float64 [L, H], ``best`` the best set's (None: it is the best set)."""
        method = self.methods.setdefault((group, label), Method(group, label))
        method.add(budget, share, share if best is None else best)

    def summary(self) -> list[dict[str, Any]]:
        return [method.summary() for method in self.methods.values()]

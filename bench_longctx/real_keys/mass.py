"""Attention mass: what a block attends to, how a row is scored, what a set of rows holds.

A block of M queries follows a prefix of s rows. A query's softmax runs over the prefix and over the block's
own rows up to itself; its prefix mass is what falls on the prefix. Masses are added over the block's queries
and the G query heads of a KV head, since a set of rows serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# The first rows and the last rows of the prefix that every set holds, as in the engine's defaults.
SINK_ROWS = 4
RECENT_ROWS = 64

Operator = Literal["max", "sum", "mean_max"]


@dataclass(frozen=True)
class QuerySet:
    """Queries that score rows, of one layer.

    Attributes:
        values: float32 [H, n, G, D].
        lse: float32 [H, n, G], natural log-sum-exp of each one's scaled scores.
    """

    values: torch.Tensor
    lse: torch.Tensor

    def take(self, indices: list[int]) -> QuerySet:
        return QuerySet(self.values[:, indices], self.lse[:, indices])

    def log_weights(self, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Log of each query's attention to each row of ``keys`` [H, R, D]: float32 [H, n, G, R]."""
        scores = torch.einsum("hngd,hrd->hngr", self.values, keys) * scale
        return scores - self.lse[..., None]


def by_kv_head(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[n, Hq, D] -> [H, n, G, D]."""
    return queries.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)


def attend(queries: torch.Tensor, keys: torch.Tensor, first: int, scale: float) -> QuerySet:
    """Queries of the positions ``first .. first + n`` with what each one's softmax is divided by.

    Args:
        queries: [n, Hq, D] of one layer.
        keys: [H, T, D] of the layer, T >= first + n.
    """
    values = by_kv_head(queries, keys.shape[0])
    count = values.shape[1]
    scores = torch.einsum("hngd,hrd->hngr", values, keys[:, : first + count]) * scale
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores[..., first:].masked_fill_(future[None, :, None, :], -torch.inf)
    return QuerySet(values, scores.logsumexp(-1))


def mean_query(block: QuerySet, keys: torch.Tensor, scale: float) -> QuerySet:
    """The mean of a block's queries, one for each head; its softmax runs over the rows of ``keys``."""
    values = block.values.mean(1, keepdim=True)
    return QuerySet(values, (torch.einsum("hngd,hrd->hngr", values, keys) * scale).logsumexp(-1))


def row_mass(block: QuerySet, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Mass [H, s] that a block puts on each prefix row; ``keys`` [H, s, D]."""
    return block.log_weights(keys, scale).exp().sum((1, 2))


def reduce(log_weights: torch.Tensor, operator: Operator) -> torch.Tensor:
    """Score of each row [H, R] from the log weights [H, n, G, R] of n queries and G heads.

    "max": the largest over queries and heads. "sum": log of the sum over both. "mean_max": mean of the
    softmax over the queries, then the largest over the heads (as a log).
    """
    if operator == "max":
        return log_weights.amax((1, 2))
    if operator == "sum":
        return log_weights.flatten(1, 2).logsumexp(1)
    if operator == "mean_max":
        return log_weights.logsumexp(1).amax(1)  # a log of the sum ranks rows as the mean does
    raise ValueError(f"unknown operator {operator!r}")


@dataclass(frozen=True)
class Span:
    """The rows of a prefix among which a set is chosen: all but sinks and recent window.

    Attributes:
        prefix: rows of the prefix.
    """

    prefix: int

    @property
    def first(self) -> int:
        return min(SINK_ROWS, self.prefix)

    @property
    def last(self) -> int:
        return max(self.first, self.prefix - RECENT_ROWS)

    def rows_chosen(self, budget: float) -> int:
        """Rows a set of ``budget`` times the prefix (rounded up) chooses beside its sinks and recent rows."""
        wanted = -int(-self.prefix * budget // 1)
        return min(max(wanted - SINK_ROWS - RECENT_ROWS, 0), self.last - self.first)

    def candidates(self, rows: torch.Tensor) -> torch.Tensor:
        """The part [..., last - first] of a value per prefix row [..., s]."""
        return rows[..., self.first : self.last]

    def fixed_mass(self, mass: torch.Tensor) -> torch.Tensor:
        """Mass float64 [H] that sinks and recent window hold, of masses [H, s]."""
        return mass.sum(-1, dtype=torch.float64) - self.candidates(mass).sum(-1, dtype=torch.float64)


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Indices of rows by falling score, int64 [H, R]; among equals the lower row comes first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def share_by_size(mass: torch.Tensor, span: Span, order: torch.Tensor) -> torch.Tensor:
    """Share [H, R + 1] of the mass [H, s] that the fixed rows and the first 0, 1 ... R of ``order`` hold.

    float64: thousands of small masses are added.
    """
    gained = span.candidates(mass).double().gather(-1, order).cumsum(-1)
    held = torch.cat((torch.zeros(len(gained), 1, dtype=torch.float64), gained), dim=-1)
    return (held + span.fixed_mass(mass)[:, None]) / mass.sum(-1, dtype=torch.float64)[:, None]


def share_of_set(mass: torch.Tensor, span: Span, chosen: torch.Tensor) -> torch.Tensor:
    """Share [H] of the mass [H, s] that chosen positions int64 [H, k] hold, with the fixed rows."""
    held = mass.double().gather(-1, chosen).sum(-1) + span.fixed_mass(mass)
    return held / mass.sum(-1, dtype=torch.float64)


def free_best_share(mass: torch.Tensor, rows: int) -> torch.Tensor:
    """Share [H] of the ``rows`` heaviest rows of the prefix, sinks and recent window not forced."""
    return mass.double().topk(rows, dim=-1).values.sum(-1) / mass.sum(-1, dtype=torch.float64)


def window_share(mass: torch.Tensor, rows: int) -> torch.Tensor:
    """Share [H] of the last ``rows`` rows of the prefix, without sinks."""
    return mass[:, mass.shape[1] - rows :].sum(-1, dtype=torch.float64) / mass.sum(-1, dtype=torch.float64)

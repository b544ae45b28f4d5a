"""One block of one text: everything that is measured there comes from what this prepares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from bench_longctx.real_keys.baselines import page_bounds, page_means, partial_keys
from bench_longctx.real_keys.forward import Captured
from bench_longctx.real_keys.mass import (
    RECENT_ROWS,
    Operator,
    QuerySet,
    Span,
    attend,
    by_kv_head,
    mean_query,
    ranking,
    reduce,
    row_mass,
)
from herald.errors import UsageError

Scores = tuple[str, str, torch.Tensor]

# Prefixes are multiples of this many rows.
BLOCK_STEP = 64

BEST = ("best", "the block's own attention: the best any set can do")
OWN_MAX = ("queries", "all positions of the block, max")


def room(tokens: int, block_length: int) -> tuple[int, int]:
    """First and last prefix, in steps of `BLOCK_STEP` rows, of blocks in the second half of a text; the last
    comes before the first where none fits."""
    return -(-tokens // (2 * BLOCK_STEP)), (tokens - block_length) // BLOCK_STEP


def block_starts(tokens: int, count: int, block_length: int) -> list[int]:
    """``count`` prefixes spread evenly over the second half of a text, each a multiple of `BLOCK_STEP` rows.

    Raises:
        UsageError: there is no room for that many.
    """
    first, last = room(tokens, block_length)
    if not 1 <= count <= last - first + 1:
        raise UsageError(
            f"{count} blocks do not fit the second half of {tokens} tokens", f"use at most {last - first + 1}"
        )
    return [round(step_at) * BLOCK_STEP for step_at in torch.linspace(first, last, count).tolist()]


def spread(count: int, chosen: int) -> list[int]:
    """``chosen`` of ``count`` positions, evenly spread, ends included."""
    return torch.linspace(0, count - 1, chosen).round().int().tolist()


class LayerBlock:
    """A block of M queries and its prefix in one layer.

    Attributes:
        span: the candidates, R rows.
        keys: [H, s, D] of the prefix.
        own: the block's queries. before: those of the block before.
        mass: [H, s], attention mass of the block on each prefix row.
        log_weights: [H, M, G, R], own queries on the candidates.
    """

    def __init__(self, captured: Captured, layer: int, start: int, block_length: int) -> None:
        if not block_length <= min(RECENT_ROWS, start):
            raise ValueError(f"blocks of {block_length} at {start}: use at most {RECENT_ROWS}")
        self.block_length = block_length
        self.scale = captured.scale
        self.span = Span(start)
        everything = captured.keys[layer]
        self.keys = everything[:, :start]
        queries = captured.at(start - block_length, start + block_length)[layer]
        self.before = attend(queries[:block_length], everything, start - block_length, self.scale)
        self.own = attend(queries[block_length:], everything, start, self.scale)
        self.mass = row_mass(self.own, self.keys, self.scale)
        self.log_weights = self._on_candidates(self.own)

    @cached_property
    def before_log_weights(self) -> torch.Tensor:
        """[H, M, G, R]: the candidates lie before that block, so nothing of them is hidden from it."""
        return self._on_candidates(self.before)

    @cached_property
    def before_mass(self) -> torch.Tensor:
        """Mass [H, s] of the block before on its own prefix; its own rows have none."""
        prefix = self.span.prefix - self.block_length
        mass = torch.zeros_like(self.mass)
        mass[:, :prefix] = row_mass(self.before, self.keys[:, :prefix], self.scale)
        return mass

    def all_scores(self, sample: torch.Tensor) -> Iterator[Scores]:
        """(group, label, scores [H, R]) of every method that ranks with exact keys or a baseline.

        ``sample`` [H, n, G, D]: earlier queries, for the partial keys.
        """
        yield *BEST, self.span.candidates(self.mass)
        yield *OWN_MAX, reduce(self.log_weights, "max")
        yield "queries", "all positions of the block, sum of softmax", reduce(self.log_weights, "sum")
        yield (
            "queries",
            "all positions of the block, mean over queries, max over heads",
            reduce(self.log_weights, "mean_max"),
        )
        few = {
            "mean query": mean_query(self.own, self.keys, self.scale),
            "five spread queries": self.own.take(spread(self.block_length, 5)),
            "the centre query": self.own.take([self.block_length // 2]),
        }
        for label, queries in few.items():
            weights = self._on_candidates(queries)
            yield "queries", f"{label}, max", reduce(weights, "max")
            yield "queries", f"{label}, sum", reduce(weights, "sum")
        operators: tuple[Operator, ...] = ("max", "sum")
        for operator in operators:
            yield (
                "queries",
                f"all queries of the block before, {operator}",
                reduce(self.before_log_weights, operator),
            )
        at = self.own, self.keys, self.span, self.scale
        for operator in operators:
            yield "other indexes", f"page bounds (Quest), pages of 16, {operator}", page_bounds(*at, operator)
            yield "other indexes", f"page means, pages of 16, {operator}", page_means(*at, operator)
            yield (
                "other indexes",
                f"partial keys (InfiniGen), 30% of dimensions, {operator}",
                partial_keys(*at, operator, sample),
            )
        rows = torch.arange(self.span.first, self.span.last, dtype=torch.float32)
        yield "other indexes", "sinks and recent window only", rows.expand(len(self.mass), -1)

    def previous_sets(self, budgets: list[float]) -> dict[float, torch.Tensor]:
        """By budget, what the block before chose with all its own queries and "max": bool [H, s]."""
        span = Span(self.span.prefix - self.block_length)
        weights = self.before.log_weights(self.keys[:, span.first : span.last], self.scale)
        return _sets(ranking(reduce(weights, "max")), span, budgets, self.mass.shape[1])

    def previous_best_sets(self, budgets: list[float]) -> dict[float, torch.Tensor]:
        """By budget, the best set of the block before: bool [H, s]."""
        span = Span(self.span.prefix - self.block_length)
        order = ranking(span.candidates(self.before_mass[:, : span.prefix]))
        return _sets(order, span, budgets, self.mass.shape[1])

    def resident_scores(self, chosen: torch.Tensor, operator: Operator) -> torch.Tensor:
        """Scores [H, R] with the log-sum-exp that the engine has, over the rows resident until now.

        ``chosen`` bool [H, s] from `previous_sets`. Resident are sinks, recent window, these rows, the block
        before and the block itself.
        """
        window = self.span.prefix - self.block_length - RECENT_ROWS
        absent = ~chosen
        absent[:, : self.span.first] = False
        absent[:, window:] = False
        missed = (self.log_weights.exp() * self.span.candidates(absent)[:, None, None]).sum(-1, keepdim=True)
        lse_change = torch.log1p(-missed.clamp(max=1 - 1e-6))
        return reduce(self.log_weights - lse_change, operator)

    def _on_candidates(self, queries: QuerySet) -> torch.Tensor:
        return queries.log_weights(self.keys[:, self.span.first : self.span.last], self.scale)


def _sets(order: torch.Tensor, span: Span, budgets: list[float], width: int) -> dict[float, torch.Tensor]:
    sets = {}
    for budget in budgets:
        chosen = torch.zeros(len(order), width, dtype=torch.bool)
        chosen.scatter_(1, order[:, : span.rows_chosen(budget)] + span.first, True)
        sets[budget] = chosen
    return sets


def sample_queries(captured: Captured, layer: int, before: int) -> torch.Tensor:
    """Queries [H, n, G, D] of ``layer`` that were kept at positions below ``before``."""
    kept = captured.queries[layer, captured.positions < before]
    return by_kv_head(kept, captured.keys.shape[1])

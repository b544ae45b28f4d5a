"""Runs every method on every block of a text. What is chosen, and what it holds, is defined in `mass`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench_longctx.real_keys.adaptive import RULES, allocate
from bench_longctx.real_keys.block import BEST, OWN_MAX, LayerBlock, sample_queries
from bench_longctx.real_keys.forward import Captured
from bench_longctx.real_keys.indexed import IndexedKeys
from bench_longctx.real_keys.mass import (
    Span,
    free_best_share,
    ranking,
    reduce,
    share_by_size,
    share_of_set,
    window_share,
)
from bench_longctx.real_keys.tally import Tally, index_label, spread_of
from herald.config import IndexBits, ScoreOperator
from herald.kvstore.native import Backend

INDEX_BITS: tuple[IndexBits, ...] = (16, 8, 4, 1)
OPERATORS: tuple[ScoreOperator, ...] = ("max", "sum")
# The published method's own rule: so many times the rows.
PUBLISHED_FACTOR = 1.75
WIDER = {OWN_MAX[1], "the centre query, max", "the centre query, sum"}
# A coarse pass keeps one row in so many.
COARSE = 4


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        starts: prefix of each block, rows.
        block_length: positions of a block, at most 64.
        budgets: rows of a set / rows of the prefix.
        num_threads: of the selector, 0 for all usable cores.
        backend: of index and selector.
        dtype: of the pool's rows.
    """

    starts: list[int]
    block_length: int = 32
    budgets: tuple[float, ...] = (0.02, 0.05, 0.10)
    num_threads: int = 0
    backend: Backend = "auto"
    dtype: torch.dtype = torch.bfloat16


class Measurement:
    """Sums up block after block.

    Attributes:
        tally: shares of all methods.
        overlap: by label and budget, values of the layers, heads and blocks.
        adaptive: (estimate, rule, scope) as methods; largest: their largest head over the mean, by budget.
    """

    def __init__(self, captured: Captured, plan: Plan, keys: IndexedKeys) -> None:
        self.captured, self.plan, self.keys = captured, plan, keys
        self.tally = Tally()
        self.adaptive = Tally()
        self.largest: dict[tuple[str, str, float], list[float]] = {}
        self.overlap: dict[str, dict[float, list[torch.Tensor]]] = {}

    def add_block(self, start: int) -> None:
        """Measure the block behind ``start`` rows."""
        captured, plan = self.captured, self.plan
        first_query = plan.starts[0] - plan.block_length
        layers = [
            LayerBlock(captured, layer, start, plan.block_length) for layer in range(len(captured.keys))
        ]
        span = layers[0].span
        rows = {budget: span.rows_chosen(budget) for budget in plan.budgets}
        curves: dict[tuple[str, str], list[torch.Tensor]] = {}
        for number, layer in enumerate(layers):
            for group, label, scores in layer.all_scores(sample_queries(captured, number, first_query)):
                curve = share_by_size(layer.mass, span, ranking(scores))
                curves.setdefault((group, label), []).append(curve)
        by_method = {key: torch.stack(of_layers) for key, of_layers in curves.items()}
        best = {budget: by_method[BEST][..., k] for budget, k in rows.items()}
        self._add_curves(by_method, best, span)
        self._add_indexes(layers, best)
        self._add_resident(layers, best)
        self._add_overlap(layers)
        self._add_adaptive(layers, by_method[BEST], best)

    def summary(self) -> dict[str, Any]:
        """All results as plain JSON values."""
        adaptive = self.adaptive.summary()
        for method in adaptive:
            for budget, cell in method["budgets"].items():
                sizes = self.largest[method["group"], method["label"], float(budget)]
                cell["largest_head_over_mean"] = round(max(sizes), 3)
        overlap: dict[str, dict[str, Any]] = {}
        for label, by_budget in self.overlap.items():
            cells = overlap.setdefault(label, {})
            for budget, values in by_budget.items():
                mean, lowest = spread_of(values)
                by_layer = [round(x, 5) for x in torch.stack(values).mean((0, 2)).tolist()]
                cells[f"{budget:g}"] = {"mean": mean, "p10": lowest, "by_layer": by_layer}
        return {"methods": self.tally.summary(), "overlap": overlap, "adaptive": adaptive}

    def _add_curves(
        self, by_method: dict[tuple[str, str], torch.Tensor], best: dict[float, torch.Tensor], span: Span
    ) -> None:
        for budget in self.plan.budgets:
            k = span.rows_chosen(budget)
            for (group, label), curve in by_method.items():
                self.tally.add(group, label, budget, curve[..., k], best[budget])
                if label in WIDER:
                    wider = curve[..., span.rows_chosen(PUBLISHED_FACTOR * budget)]
                    self.tally.add(f"x {PUBLISHED_FACTOR:g} rows", label, budget, wider, best[budget])

    def _add_indexes(self, layers: list[LayerBlock], best: dict[float, torch.Tensor]) -> None:
        """What the runtime's index and selector choose with all own queries."""
        span, start, length = layers[0].span, layers[0].span.prefix, self.plan.block_length
        queries = self.captured.at(start, start + length)
        lse = torch.stack([layer.own.lse.transpose(0, 1).flatten(1) for layer in layers])
        asked = queries.contiguous(), lse.contiguous()

        def shares(chosen: torch.Tensor) -> torch.Tensor:
            return torch.stack([share_of_set(x.mass, span, set_) for x, set_ in zip(layers, chosen)])

        for operator in OPERATORS:
            for bits in INDEX_BITS:
                for budget in self.plan.budgets:
                    chosen = self.keys.select(bits, operator, span, span.rows_chosen(budget), *asked)
                    self.tally.add("index", index_label(bits, operator), budget, shares(chosen), best[budget])
        coarse = self.keys.select(1, "max", span, -(-(span.last - span.first) // COARSE), *asked)
        curves = []
        for layer, kept in zip(layers, coarse):
            scores = reduce(layer.log_weights, "max")
            outside = torch.ones_like(scores, dtype=torch.bool).scatter(1, kept - span.first, False)
            curves.append(share_by_size(layer.mass, span, ranking(scores.masked_fill(outside, -torch.inf))))
        for budget in self.plan.budgets:
            held = torch.stack(curves)[..., span.rows_chosen(budget)]
            self.tally.add(
                "index", f"1 bit, then exact on 1/{COARSE} of the rows, max", budget, held, best[budget]
            )

    def _add_resident(self, layers: list[LayerBlock], best: dict[float, torch.Tensor]) -> None:
        """The log-sum-exp that the engine has; sets that need not hold sinks and recent rows."""
        span = layers[0].span
        held: dict[tuple[str, str, float], list[torch.Tensor]] = {}
        for layer in layers:
            previous = layer.previous_sets(list(self.plan.budgets))
            for budget in self.plan.budgets:
                k = span.rows_chosen(budget)
                for operator in OPERATORS:
                    order = ranking(layer.resident_scores(previous[budget], operator))
                    share = share_by_size(layer.mass, span, order)[:, k]
                    label = f"all positions, normalised over the resident rows, {operator}"
                    held.setdefault(("queries", label, budget), []).append(share)
                size = k + span.prefix - (span.last - span.first)
                label = "best set, sinks and recent rows not forced"
                held.setdefault(("best", label, budget), []).append(free_best_share(layer.mass, size))
                window = ("other indexes", "recent window only, no sinks", budget)
                held.setdefault(window, []).append(window_share(layer.mass, size))
        for (group, label, budget), shares in held.items():
            self.tally.add(group, label, budget, torch.stack(shares), best[budget])

    def _add_overlap(self, layers: list[LayerBlock]) -> None:
        """What of a block's set the block before had chosen, or had resident."""
        span, budgets = layers[0].span, list(self.plan.budgets)
        for name, pick, before in (
            ("best sets", lambda x: x.span.candidates(x.mass), LayerBlock.previous_best_sets),
            ("all positions, max", lambda x: reduce(x.log_weights, "max"), LayerBlock.previous_sets),
        ):
            self._add_overlap_of(name, layers, span, budgets, pick, before)

    def _add_overlap_of(
        self,
        name: str,
        layers: list[LayerBlock],
        span: Span,
        budgets: list[float],
        pick: Callable[[LayerBlock], torch.Tensor],
        before: Callable[[LayerBlock, list[float]], dict[float, torch.Tensor]],
    ) -> None:
        resident_from = span.last - self.plan.block_length
        shares: dict[tuple[str, float], list[torch.Tensor]] = {}
        for layer in layers:
            previous = before(layer, budgets)
            order = ranking(pick(layer)) + span.first
            for budget in budgets:
                chosen = order[:, : span.rows_chosen(budget)]
                again = previous[budget].gather(1, chosen)
                shares.setdefault((f"{name}: chosen again", budget), []).append(again.double().mean(1))
                there = (again | (chosen >= resident_from)).double().mean(1)
                shares.setdefault((f"{name}: already resident", budget), []).append(there)
        for (label, budget), of_layers in shares.items():
            self.overlap.setdefault(label, {}).setdefault(budget, []).append(torch.stack(of_layers))

    def _add_adaptive(
        self, layers: list[LayerBlock], best_curve: torch.Tensor, best: dict[float, torch.Tensor]
    ) -> None:
        """Set sizes per head, with the block's own mass as the estimate and with the block before's."""
        span = layers[0].span
        orders = [ranking(reduce(layer.before_log_weights, "sum")) for layer in layers]
        held = torch.stack([share_by_size(x.mass, span, order) for x, order in zip(layers, orders)])
        guess = torch.stack([share_by_size(x.before_mass, span, order) for x, order in zip(layers, orders)])
        estimates = {"own mass": (best_curve, best_curve), "mass of the block before": (guess, held)}
        for name, (estimate, truth) in estimates.items():
            for rule in RULES:
                for over_layers in (False,) if rule == "uniform" else (False, True):
                    scope = "" if rule == "uniform" else " over layers" if over_layers else " in a layer"
                    for budget in self.plan.budgets:
                        k = span.rows_chosen(budget)
                        counts = allocate(estimate, k, rule, over_layers)
                        share = truth.gather(-1, counts[..., None])[..., 0]
                        self.adaptive.add(name, rule + scope, budget, share, best[budget])
                        sizes = self.largest.setdefault((name, rule + scope, budget), [])
                        sizes.append(counts.max().item() / max(k, 1))


def measure(captured: Captured, plan: Plan, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Everything, over all blocks of the plan; ``report`` gets a line a block."""
    with IndexedKeys(captured, plan.block_length, plan.dtype, plan.num_threads, plan.backend) as keys:
        measurement = Measurement(captured, plan, keys)
        for number, start in enumerate(plan.starts):
            began = time.perf_counter()
            measurement.add_block(start)
            seconds = time.perf_counter() - began
            report(f"block {number + 1} of {len(plan.starts)} behind {start} rows: {seconds:.1f} s")
        return measurement.summary()

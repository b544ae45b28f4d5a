"""The results as a Markdown table, and the two figures that are held against a bar."""

from __future__ import annotations

from typing import Any

from bench_longctx.real_keys.tally import index_label
from herald.config import OffloadConfig

# The budget at which the bars are set.
BAR_BUDGET = "0.05"
BEST_BAR = 0.97
FOUR_BIT_BAR = 0.995

# Parts of the table, in this order.
GROUPS = (
    "best",
    "queries",
    "x 1.75 rows",
    "index",
    "other indexes",
    "set sizes from own mass",
    "set sizes from mass of the block before",
)


def share_of(results: dict[str, Any], group: str, label: str, budget: str, value: str = "share") -> float:
    """One figure of one method."""
    for method in results["methods"]:
        if (method["group"], method["label"]) == (group, label):
            return method["budgets"][budget][value]
    raise KeyError((group, label))


def bars(results: dict[str, Any]) -> dict[str, Any]:
    """What the default holds of the best set's mass, and 4 bits of exact keys', beside their bars.

    Empty if the budget of the bars was not measured.
    """
    if BAR_BUDGET not in results["methods"][0]["budgets"]:
        return {}
    default = OffloadConfig()
    label = index_label(default.index_bits, default.score_operator)
    found = {
        "default": label,
        "default_of_best": share_of(results, "index", label, BAR_BUDGET, "relative"),
        "default_of_best_bar": BEST_BAR,
        "four_bits_of_exact_bar": FOUR_BIT_BAR,
    }
    for operator in ("max", "sum"):
        four, exact = (share_of(results, "index", index_label(b, operator), BAR_BUDGET) for b in (4, 16))
        found[f"four_bits_of_exact_{operator}"] = four / exact
    return found


def markdown(results: dict[str, Any]) -> str:
    """A row a method: shares by budget, then what they are of the best set's, then its 10th percentile."""
    methods = results["methods"] + [
        {**m, "group": f"set sizes from {m['group']}"} for m in results["adaptive"]
    ]
    budgets = list(methods[0]["budgets"])
    names = [f"{100 * float(b):g}%" for b in budgets]
    head = ["", "rows chosen by", *names, *(f"of best, {n}" for n in names), *(f"p10, {n}" for n in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    group = None
    for method in sorted(methods, key=lambda m: GROUPS.index(m["group"])):
        cells = [method["budgets"][b] for b in budgets]
        shares = [f"{c['share']:.3f}" for c in cells]
        relative = [f"{100 * c['relative']:.1f}" for c in cells]
        lowest = [f"{100 * c['relative_p10']:.1f}" for c in cells]
        shown = "" if method["group"] == group else method["group"]
        group = method["group"]
        lines.append("| " + " | ".join([shown, method["label"], *shares, *relative, *lowest]) + " |")
    lines += ["", "| rows of a block's set that the block before had | " + " | ".join(names) + " |"]
    lines.append("|" + "---|" * (len(names) + 1))
    for label, by_budget in results["overlap"].items():
        lines.append(f"| {label} | " + " | ".join(f"{c['mean']:.2f}" for c in by_budget.values()) + " |")
    return "\n".join(lines)

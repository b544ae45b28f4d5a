"""Three plots: mass against budget, against index bits, and how much of a set the block before had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench_longctx.real_keys.table import BAR_BUDGET, share_of
from bench_longctx.real_keys.tally import index_label

_CURVES = (
    ("best", "the block's own attention: the best any set can do", "best set (= sum of softmax)"),
    ("queries", "all positions of the block, max", "all positions, max"),
    ("queries", "all queries of the block before, max", "block before, max"),
    ("queries", "the centre query, max", "centre query"),
    ("x 1.75 rows", "the centre query, max", "centre query, 1.75 x the rows"),
    ("index", "4 bits, max", "all positions, 4-bit index"),
    ("index", "1 bit, max", "all positions, 1-bit index"),
    ("other indexes", "partial keys (InfiniGen), 30% of dimensions, max", "partial keys"),
    ("other indexes", "page bounds (Quest), pages of 16, max", "page bounds"),
    ("other indexes", "sinks and recent window only", "sinks and recent window"),
)
_BITS = (16, 8, 4, 1)


def save_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write real_keys_{budget,index,overlap}.png into ``folder``, which is made if it is not there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in (("budget", _budget), ("index", _index), ("overlap", _overlap)):
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        draw(axes, results)
        axes.grid(alpha=0.3)
        files.append(folder / f"real_keys_{name}.png")
        figure.savefig(files[-1], dpi=110)
        pyplot.close(figure)
    return files


def _budgets(results: dict[str, Any]) -> list[str]:
    return list(results["methods"][0]["budgets"])


def _budget(axes: Any, results: dict[str, Any]) -> None:
    budgets = _budgets(results)
    at = [100 * float(b) for b in budgets]
    for group, label, name in _CURVES:
        shares = [share_of(results, group, label, b) for b in budgets]
        style = "k--" if group == "best" else "x:" if label == "4 bits, max" else "o-"
        axes.plot(at, shares, style, label=name, linewidth=1.4, markersize=4)
    axes.set(
        xlabel="rows of the set, % of the prefix", ylabel="share of the prefix attention mass", xticks=at
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _index(axes: Any, results: dict[str, Any]) -> None:
    for operator, style in (("max", "o-"), ("sum", "s--")):
        for colour, budget in enumerate(_budgets(results)):
            values = [
                100 * share_of(results, "index", index_label(b, operator), budget, "relative") for b in _BITS
            ]
            name = f"{operator}, {100 * float(budget):g}%"
            axes.plot(range(len(_BITS)), values, style, color=f"C{colour}", label=name, markersize=4)
    axes.set(ylabel="mass, % of the best set's", xlabel="bits a key component", xticks=range(len(_BITS)))
    axes.set_xticklabels([str(b) for b in _BITS])
    axes.legend(title="operator, budget", fontsize=8, title_fontsize=8, ncols=2)


def _overlap(axes: Any, results: dict[str, Any]) -> None:
    for label, style in (("all positions, max: chosen again", "-"), ("best sets: chosen again", ":")):
        for colour, (budget, values) in enumerate(results["overlap"][label].items()):
            if style == ":" and budget != BAR_BUDGET:
                continue
            name = f"{label.split(':')[0]}, {100 * float(budget):g}%"
            layers = range(len(values["by_layer"]))
            axes.plot(layers, values["by_layer"], style, color=f"C{colour}", label=name)
    axes.set(xlabel="layer", ylabel="rows that the block before chose too", ylim=(0, 1))
    axes.legend(fontsize=8)

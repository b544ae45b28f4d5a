"""Scores by task and method, at one length and budget, as a picture.

python -m bench_longctx.quality.plot bench_longctx/results/quality_methods.json --out scores.png \\
    --methods lookahead_hold lookahead_1 own_step0 previous_block page_bounds partial_keys centre window_sinks
python -m bench_longctx.quality.plot bench_longctx/results/quality_index.json --out index.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_longctx import output
from bench_longctx.quality import methods
from bench_longctx.quality.report import Cells, headings, load, tasks_of
from herald.errors import UsageError

_LABELS = {
    "dense": "full KV",
    "lookahead_hold": "look-ahead, both rules",
    "own_hold": "the rules without look-ahead",
    "lookahead_1": "look-ahead alone",
    "lookahead_k": "look-ahead alone, later",
    "lookahead_late": "look-ahead alone, late",
    "lookahead_refresh": "look-ahead and a refresh",
    "own_step0": "own queries at the boundary",
    "previous_block": "queries of the block before",
    "page_bounds": "page bounds",
    "partial_keys": "partial keys",
    "centre": "centre query, 1.75 x the rows",
    "window_sinks": "sinks and recent rows",
}
# Full KV is what the others are held against: the one grey.
_FULL = "0.6"
_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "k", "navy", "gold", "salmon", "darkgreen")


def series_of(
    cells: Cells, length: int, budget: float, only: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """{label of a method: {task: score in percent}} at a length and a budget, `dense` first.

    Methods come in the order of the labels above, then by name. Index bits and operator are named where a
    method has several.

    Args:
        only: names of methods, beside `dense`; empty for all.

    Raises:
        UsageError: there are no such cells; names what is there.
    """
    named = sorted({cell["method"] for cell in cells.values()} - {"dense"})
    if unknown := [name for name in only if name not in named]:
        remedy = f"use {', '.join(named)}; dense comes by itself"
        raise UsageError(f"{unknown[0]!r} is no method to show beside dense", remedy)
    if only:
        cells = {key: cell for key, cell in cells.items() if cell["method"] in ("dense", *only)}
    there = [
        cell
        for cell in cells.values()
        if cell["length"] == length and (cell["method"] == "dense" or cell["budget"] == budget)
    ]
    if all(cell["method"] == "dense" for cell in there):
        sets = sorted({(c["length"], c["budget"]) for c in cells.values() if c["method"] != "dense"})
        usable = ", ".join(f"--length {n} --budget {share}" for n, share in sets)
        raise UsageError(
            f"no method was run at --length {length} --budget {budget}",
            f"use one of {usable}" if sets else "run methods other than dense into this report",
        )
    # a report may be of a version with other methods
    order = list(dict.fromkeys([*_LABELS, *methods.NAMES, *(cell["method"] for cell in there)]))
    variants: dict[str, set[str]] = {}
    for cell in there:
        variants.setdefault(cell["method"], set()).add(_variant(cell))
    found: dict[str, dict[str, float]] = {}
    for cell in sorted(there, key=lambda cell: (order.index(cell["method"]), -cell["index_bits"])):
        label = _LABELS.get(cell["method"], cell["method"])
        if len(variants[cell["method"]]) > 1:
            label += f", {_variant(cell)}"
        elif cell["method"] == "lookahead_k":
            label += f", step {cell['lookahead_step']}"
        found.setdefault(label, {})[cell["task"]] = 100 * cell["score"]
    return found


def _variant(cell: dict[str, Any]) -> str:
    step = f", step {cell['lookahead_step']}" if cell["method"] == "lookahead_k" else ""
    return f"{cell['index_bits']}-bit, {cell['operator']}{step}"


def save_plot(
    cells: Cells, tasks: Sequence[str], length: int, budget: float, path: Path, only: Sequence[str] = ()
) -> None:
    """Write a group of bars a task, one bar a method, into ``path``; its folder is made. See `series_of`.

    Raises:
        UsageError: there are no such cells, ``path`` cannot be written, or matplotlib is not installed.
    """
    if path.is_dir() or not path.suffix:
        what = "is a folder" if path.is_dir() else "does not say of what kind the picture is to be"
        example = path / "scores.png" if path.is_dir() else path.with_name(path.name + ".png")
        raise UsageError(f"{path} {what}", f"name a .png or .svg file, such as {example}")
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "no picture: matplotlib is missing", "run: pip install 'herald-dllm[profile]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = series_of(cells, length, budget, only)
    shown = [task for task in tasks if any(task in scores for scores in series.values())]
    width = 0.85 / len(series)
    figure, axes = pyplot.subplots(figsize=(9.5, 3.8), layout="constrained")
    for number, (label, scores) in enumerate(series.items()):
        full = number == 0 and label == _LABELS["dense"]
        colour = _FULL if full else _COLOURS[(number - 1) % len(_COLOURS)]
        at = [place + width * (number - (len(series) - 1) / 2) for place in range(len(shown))]
        axes.bar(at, [scores.get(task, 0.0) for task in shown], width, label=label, color=colour)
        for place, task in zip(at, shown, strict=True):
            if task not in scores:
                axes.text(
                    place, 1, "not run", fontsize=6, rotation=90, ha="center", va="bottom", color=colour
                )
    axes.set(ylabel="score, %", ylim=(0, 101), xticks=range(len(shown)))
    axes.set_xticklabels(headings(shown))
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: no format of matplotlib
        raise UsageError(f"{path} cannot be written ({error})", "name a .png or .svg file") from error
    finally:
        pyplot.close(figure)


@output.command
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("report", type=Path, help="JSON of bench_longctx.quality.run")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--methods", nargs="+", default=[], help="names, beside dense; all by default")
    args = parser.parse_args(argv)
    settings, cells = load(args.report)
    save_plot(cells, tasks_of(settings, cells), args.length, args.budget, args.out, args.methods)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main())

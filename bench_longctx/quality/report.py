"""The report of a run: cells by key, as JSON that a later run goes on with, and as a table."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bench_longctx import machine
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.quality.statistics import paired_means, paired_shares
from herald.errors import UsageError

Cells = dict[str, dict[str, Any]]
_COSTS = (
    "blocks",
    "steps_per_block",
    "forwards_per_block",
    "selection_seconds_per_block",
    "bytes_moved_per_block",
    "exposed_share",
)
# What a cell must have to be shown, or run anew.
_CELL = {**get_type_hints(Job), "task": str, "score": float, "scores": list[float], "cost": dict[str, Any]}


class Report:
    """Cells of one set of settings, kept in a file as they are finished.

    Args:
        settings: of all cells.
        path: of the JSON file; None keeps nothing. One that is there is gone on with.
        jobs: processes side by side; with more than one, times are not those of a machine to itself.

    Raises:
        UsageError: the file is something else, or of other settings, or its folder cannot be written to.
    """

    def __init__(self, settings: Settings, path: Path | None, jobs: int = 1) -> None:
        self.settings = settings
        self.path = path
        self.jobs = jobs
        self.cells: Cells = {} if path is None or not path.exists() else _cells_of(path, settings)
        if path is not None:
            _check_folder(path.absolute().parent)

    def add(self, key: str, cell: dict[str, Any]) -> None:
        """Take a finished cell, and write the file anew."""
        self.cells[key] = cell
        if self.path is not None:
            text = json.dumps(
                {
                    "machine": machine.describe(),
                    "settings": asdict(self.settings),
                    "jobs": self.jobs,
                    "cells": {key: {**c, **difference_of(c, self.cells)} for key, c in self.cells.items()},
                },
                indent=1,
            )
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, self.path)


def load(path: Path) -> tuple[dict[str, Any], Cells]:
    """Settings and cells of a report's file.

    Raises:
        UsageError: the file is not there, or is something else.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
        settings, cells = dict(report["settings"]), dict(report["cells"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no report of this suite ({error!r})", "name a file that --json wrote"
        ) from error
    wrong = _misfit(settings, get_type_hints(Settings), "settings")
    for key, cell in cells.items():
        wrong = wrong or _misfit(cell, _CELL, f"cell {key!r}")
        wrong = wrong or _misfit(cell["cost"], dict.fromkeys(_COSTS, float), f"cost of cell {key!r}")
    if wrong:
        raise UsageError(f"{path} is of another version ({wrong})", "name a report of this one")
    return settings, cells


def _misfit(values: Any, kinds: dict[str, Any], what: str) -> str:
    """What is wrong with values that were read from JSON, by the type each should have; "" if nothing is."""
    if not isinstance(values, dict):
        return f"{what} is no object"
    for name, kind in kinds.items():
        if name not in values:
            return f"{what} has no {name}"
        if not _is_of(values[name], kind):
            return f"{what} has {name}={values[name]!r:.40}"
    return ""


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (tuple[str, ...], list[float]):
        return isinstance(value, list) and all(_is_of(each, get_args(kind)[0]) for each in value)
    if kind == dict[str, Any]:
        return isinstance(value, dict)
    if kind is float:
        kind = (int, float)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_folder(folder: Path) -> None:
    """Make the folder of a report, before anything is computed that it is for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no right to write to {folder}")
    except OSError as error:
        raise UsageError(f"{folder} cannot hold the report ({error})", "name another --json file") from error


def _cells_of(path: Path, settings: Settings) -> Cells:
    found, cells = load(path)
    wanted = json.loads(json.dumps(asdict(settings)))
    # tasks and batch may change: documents do not depend on them
    for name in wanted.keys() - {"tasks", "batch"}:
        if found.get(name) != wanted[name]:
            raise UsageError(
                f"{path} was made with {name}={found.get(name)!r}, not {wanted[name]!r}",
                "name another --json file",
            )
    return cells


def repeated(path: Path) -> tuple[Settings, dict[Job, list[str]]]:
    """What a report holds, to be run once more: its settings, and each job's tasks.

    Raises:
        UsageError: the file is not there, or is something else.
    """
    found, cells = load(path)
    try:
        settings = Settings(**{**found, "tasks": tuple(found["tasks"])})
    except TypeError as error:  # settings that this version has not
        raise UsageError(f"{path} is of another version ({error})", "name a report of this one") from error
    jobs: dict[Job, list[str]] = {}
    for cell in cells.values():
        job = Job(**{field.name: cell[field.name] for field in fields(Job)})
        jobs.setdefault(job, []).append(cell["task"])
    if not jobs:
        raise UsageError(f"{path} has no cells", "name a report that has some")
    return settings, jobs


def dense_of(cell: dict[str, Any], cells: Cells) -> dict[str, Any] | None:
    """The dense cell of the same documents."""
    same = ("task", "length")
    for other in cells.values():
        if other["method"] == "dense" and all(other[name] == cell[name] for name in same):
            return other
    return None


def difference_of(cell: dict[str, Any], cells: Cells) -> dict[str, Any]:
    """``difference``: against dense on the same documents, in points; empty without a dense cell.

    Of the mean score with its bootstrap interval, and of the documents that are right with Newcombe's.
    """
    dense = dense_of(cell, cells)
    if dense is None or cell["method"] == "dense":
        return {}
    points = [100 * x for x in paired_means(cell["scores"], dense["scores"])]
    right = [[score >= 1 - 1e-6 for score in c["scores"]] for c in (cell, dense)]
    share = [100 * x for x in paired_shares(*right)]
    return {
        "difference": {
            **dict(zip(("score", "score_low", "score_high"), points)),
            **dict(zip(("right", "right_low", "right_high"), share)),
        }
    }


def is_clear(cell: dict[str, Any], cells: Cells) -> bool:
    """Whether the 95% interval of the difference in score against dense leaves 0 out; False without dense.

    Where documents are right or wrong it is Newcombe's, which has a width also where few differ; where they
    get a part of the score, the bootstrap's.
    """
    dense = dense_of(cell, cells)
    difference = difference_of(cell, cells).get("difference")
    if dense is None or difference is None:
        return False
    kind = "right" if {*cell["scores"], *dense["scores"]} <= {0.0, 1.0} else "score"
    return bool(difference[f"{kind}_low"] > 0 or difference[f"{kind}_high"] < 0)


def table(cells: Cells, tasks: list[str]) -> str:
    """Markdown, one table a length: a row for each method and budget, a column for each task.

    A task's entry is its mean score in points, then the difference against dense in brackets, with a star
    where `is_clear`. Costs are a block's, means over all tasks by their blocks.
    """
    blocks = []
    for length in sorted({cell["length"] for cell in cells.values()}):
        here = [cell for cell in cells.values() if cell["length"] == length]
        rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
        for cell in here:
            rows.setdefault(_row_name(cell), {})[cell["task"]] = cell
        columns = [task for task in tasks if any(task in row for row in rows.values())]
        costs = ["steps", "forwards", "select ms", "MB", "exposed"]
        head = ["method", "KV", *(Path(task).stem for task in columns), *costs]
        lines = [f"### {length}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for name in sorted(rows, key=lambda name: (name[0] != "dense", name)):
            row = rows[name]
            entries = [_entry(row.get(task), cells) for task in columns]
            lines.append("| " + " | ".join([*name, *entries, *_costs(list(row.values()))]) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _row_name(cell: dict[str, Any]) -> tuple[str, ...]:
    if cell["method"] == "dense":
        return "dense", "100%"
    name = cell["method"]
    if name == "lookahead_k":
        name = f"lookahead_{cell['lookahead_step']}"
    return f"{name} {cell['index_bits']}-bit {cell['operator']}", f"{cell['budget']:.0%}"


def _entry(cell: dict[str, Any] | None, cells: Cells) -> str:
    if cell is None:
        return ""
    text = f"{100 * cell['score']:.1f}"
    difference = difference_of(cell, cells).get("difference")
    if difference is None:
        return text
    return f"{text} ({difference['score']:+.1f}{'*' if is_clear(cell, cells) else ''})"


def _costs(row: list[dict[str, Any]]) -> list[str]:
    """Steps, forwards, milliseconds of selection and MB moved a block, the exposed share: means by blocks."""
    blocks = sum(cell["cost"]["blocks"] for cell in row)

    def mean(name: str) -> float:
        return sum(cell["cost"][name] * cell["cost"]["blocks"] for cell in row) / blocks

    return [
        f"{mean('steps_per_block'):.2f}",
        f"{mean('forwards_per_block'):.2f}",
        f"{1e3 * mean('selection_seconds_per_block'):.2f}",
        f"{mean('bytes_moved_per_block') / 1e6:.2f}",
        f"{mean('exposed_share'):.0%}",
    ]

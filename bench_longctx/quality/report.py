"""The report of a run: cells by key, as JSON that a later run goes on with, and as a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bench_longctx import machine
from bench_longctx.quality import longbench
from bench_longctx.quality.cases import BYTE_TASKS, TOKEN_TASKS
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.quality.report_file import ReportFile, check_regular
from bench_longctx.quality.statistics import LEAST_DOCUMENTS, paired_means, paired_shares
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
    """Cells of one set of settings, kept in a file as they are finished. A context manager.

    A file that is there is gone on with: its settings, machine and ``jobs`` stay those of the run that began
    it, with this run's tasks added. A cell of a later run says what was otherwise: ``machine``, the parts of
    the description that differ (the commit, say), ``jobs`` and ``batch``.

    Args:
        settings: of all cells.
        path: of the JSON file; None keeps nothing.
        jobs: processes side by side; with more than one, times are not those of a machine to itself.
        digests: {task: `cells.digest_of` it} of the tasks that are asked for.

    Raises:
        UsageError: the file is something else, of other settings, or of other content of the tasks' files;
            another run writes it; or it cannot be written.
    """

    def __init__(
        self, settings: Settings, path: Path | None, jobs: int = 1, digests: dict[str, str] | None = None
    ) -> None:
        self.settings = settings
        self.cells: Cells = {}
        self._file = None if path is None else ReportFile(path)
        if self._file is None:
            return
        here = {"machine": machine.describe(), "settings": asdict(settings), "jobs": jobs}
        self._here = self._head = json.loads(json.dumps(here))
        try:
            if path is not None and path.exists():
                self._head, self.cells = _begun(path, self._here, digests or {})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write the file."""
        if self._file is not None:
            self._file.close()

    def add(self, key: str, cell: dict[str, Any]) -> None:
        """Take a finished cell, and write the file anew.

        Raises:
            ReportLost: the file cannot be written.
        """
        if self._file is None:
            self.cells[key] = cell
            return
        self.cells[key] = {**cell, **_otherwise(self._here, self._head)}
        cells = {key: {**c, **difference_of(c, self.cells)} for key, c in self.cells.items()}
        self._file.write({**self._head, "cells": cells})


def _otherwise(here: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    """What a cell made ``here`` must say of itself, since the report says something else."""
    parts = {name: value for name, value in here["machine"].items() if head["machine"].get(name) != value}
    own: dict[str, Any] = {"machine": parts} if parts else {}
    if here["jobs"] != head["jobs"]:
        own["jobs"] = here["jobs"]
    if here["settings"]["batch"] != head["settings"]["batch"]:
        own["batch"] = here["settings"]["batch"]
    return own


def _begun(path: Path, here: dict[str, Any], digests: dict[str, str]) -> tuple[dict[str, Any], Cells]:
    """What a report says of all its cells, with the tasks of this run added; and the cells."""
    report = _read(path)
    found, cells, wanted = report["settings"], report["cells"], here["settings"]
    # tasks and batch may change: documents do not depend on them
    for name in wanted.keys() - {"tasks", "batch"}:
        if found.get(name) != wanted[name]:
            raise UsageError(
                f"{path} was made with {name}={found.get(name)!r}, not {wanted[name]!r}",
                "name another --json file",
            )
    check_digests(path, cells, digests, "name another --json file")
    tasks = list(dict.fromkeys([*found["tasks"], *wanted["tasks"]]))
    known = report.get("machine")
    return {
        "machine": known if isinstance(known, dict) else {},
        "settings": {**found, "tasks": tasks},
        "jobs": report.get("jobs"),
    }, cells


def check_digests(path: Path, cells: Cells, digests: dict[str, str], remedy: str) -> None:
    """Refuse cells of tasks whose files have other content now.

    Raises:
        UsageError: names the task.
    """
    for cell in cells.values():
        task = cell["task"]
        if task in digests and cell.get("digest", "") != digests[task]:
            raise UsageError(f"{path} has scores of other content of the files of task {task}", remedy)


def load(path: Path) -> tuple[dict[str, Any], Cells]:
    """Settings and cells of a report's file.

    Raises:
        UsageError: the file is not there, or is something else.
    """
    report = _read(path)
    return report["settings"], report["cells"]


def _read(path: Path) -> dict[str, Any]:
    check_regular(path)
    try:
        report = dict(json.loads(path.read_text("utf-8")))
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
    return {**report, "settings": settings, "cells": cells}


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
    same = ("task", "length", "digest")
    for other in cells.values():
        if other["method"] == "dense" and all(other.get(name) == cell.get(name) for name in same):
            return other
    return None


def difference_of(cell: dict[str, Any], cells: Cells) -> dict[str, Any]:
    """``difference``: against dense on the same documents, in points; empty without a dense cell.

    Of the mean score with its bootstrap interval (None for too few documents, see `paired_means`), and of the
    documents that are right with Newcombe's.
    """
    dense = dense_of(cell, cells)
    if dense is None or cell["method"] == "dense":
        return {}
    means = paired_means(cell["scores"], dense["scores"])
    points = [None if x is None else 100 * x for x in means]
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
    get a part of the score, the bootstrap's. Fewer than `LEAST_DOCUMENTS` are never clear.
    """
    dense = dense_of(cell, cells)
    difference = difference_of(cell, cells).get("difference")
    if dense is None or difference is None or len(cell["scores"]) < LEAST_DOCUMENTS:
        return False
    kind = "right" if {*cell["scores"], *dense["scores"]} <= {0.0, 1.0} else "score"
    return bool(difference[f"{kind}_low"] > 0 or difference[f"{kind}_high"] < 0)


def tasks_of(settings: dict[str, Any], cells: Cells) -> list[str]:
    """The tasks that cells have: in the order of the settings, then of the tasks that a group stands for."""
    there = {cell["task"]: None for cell in cells.values()}
    known = (*settings["tasks"], *BYTE_TASKS, *TOKEN_TASKS, *longbench.DATASETS, *there)
    return [task for task in dict.fromkeys(known) if task in there]


def headings(tasks: Sequence[str]) -> list[str]:
    """What tasks are called: a file by its stem, or as it was given where several have that stem."""
    stems = Counter(Path(task).stem for task in tasks)
    return [task if stems[Path(task).stem] > 1 else Path(task).stem for task in tasks]


def table(cells: Cells, tasks: Sequence[str]) -> str:
    """Markdown, one table a length: a row for each method and budget, a column for each task.

    A task's entry is its mean score in points, then the difference against dense in brackets, with a star
    where `is_clear`. Costs are a block's, means over all tasks by their blocks.
    """
    blocks = []
    for length in sorted({cell["length"] for cell in cells.values()}):
        here = [cell for cell in cells.values() if cell["length"] == length]
        rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for cell in here:
            rows.setdefault(_row(cell), {})[cell["task"]] = cell
        columns = [task for task in tasks if any(task in row for row in rows.values())]
        costs = ["steps", "forwards", "select ms", "MB", "exposed"]
        head = ["method", "KV", *headings(columns), *costs]
        lines = [f"### {length}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for key in sorted(rows):
            cells_here = list(rows[key].values())
            entries = [_entry(rows[key].get(task), cells) for task in columns]
            lines.append("| " + " | ".join([*_row_name(cells_here[0]), *entries, *_costs(cells_here)]) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _row(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What the cells of a row have in common, in the order of the rows: dense first."""
    if cell["method"] == "dense":
        return (False,)
    switches = (cell["lookahead_step"], -cell["index_bits"], cell["operator"])
    return (True, cell["method"], *switches, cell["budget"])


def _row_name(cell: dict[str, Any]) -> tuple[str, str]:
    if cell["method"] == "dense":
        return "dense", "100%"
    name = cell["method"]
    if name == "lookahead_k":
        name = f"lookahead_{cell['lookahead_step']}"
    # 12 digits: all that a budget was written with, without what doubles add
    return f"{name} {cell['index_bits']}-bit {cell['operator']}", f"{100 * cell['budget']:.12g}%"


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

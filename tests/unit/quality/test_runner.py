"""The runner: its matrix, what it keeps, and what its table says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.quality import cells, files, run
from bench_longctx.quality.cells import Job
from bench_longctx.quality.report import difference_of, load, repeated, table
from herald.engine.trace import Span
from herald.errors import UsageError
from tests.unit.quality.conftest import SMALL, fake_cell


def test_matrix():
    args = run.parse(["--methods", "lookahead_k", "dense", "page_bounds", "--lookahead-step", "1", "3"])
    jobs = run.jobs_of(args)
    assert [job.length for job in jobs if job.method == "dense"] == [8192, 16384, 32768]
    assert jobs[0].method == "dense"
    assert len(jobs) == 3 * (1 + 3 * 2 + 3)
    assert {job.index_bits for job in jobs if job.method == "page_bounds"} == {16}
    # switches that make no difference to a method make no further jobs
    many = ["--index-bits", "16", "8", "4", "--operator", "max", "sum", "--lookahead-step", "1", "2", "5"]
    counts = {"dense": 1, "window_sinks": 1, "page_bounds": 1, "partial_keys": 2, "lookahead_k": 18}
    for name in run.methods.NAMES:
        args = run.parse(["--methods", name, "--lengths", "8192", "--budgets", "0.1", *many])
        jobs = run.jobs_of(args)
        assert len(jobs) == counts.get(name, 6), name
        assert len({(job.index_bits, job.operator, job.lookahead_step) for job in jobs}) == len(jobs)
        if counts.get(name) == 1:
            without = run.parse(["--methods", name, "--lengths", "8192", "--budgets", "0.1"])
            assert run.jobs_of(without) == jobs
    default = run.parse([])
    assert default.count == 100 and len(run.jobs_of(default)) == 3 * (1 + 12 * 3)


def test_resume_runs_only_what_is_missing(ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "out.json"
    given = [*SMALL, "--count", "10", "--json", str(path)]
    assert run.run(run.parse([*given, "--methods", "dense", "centre", "--tasks", "keys"])) == 0
    assert ran == ["dense 1.0 2048 8 max 0 keys", "centre 0.1 2048 8 max 0 keys"]
    ran.clear()
    more = [*given, "--methods", "dense", "centre", "window_sinks", "--tasks", "keys", "needle"]
    assert run.run(run.parse(more)) == 0
    assert len(ran) == 4 and not {key for key in ran if "keys" in key} - {
        "window_sinks 0.1 2048 8 max 0 keys"
    }
    ran.clear()
    assert run.run(run.parse(more)) == 0
    assert ran == []
    report = json.loads(path.read_text())
    assert len(report["cells"]) == 6 and "machine" in report
    assert load(path)[1] == report["cells"]
    cell = report["cells"]["centre 0.1 2048 8 max 0 keys"]
    assert cell["difference"]["score"] == -60 and cell["difference"]["right_high"] < 0
    out = capsys.readouterr().out
    assert "| dense | 100% | 100.0 | 100.0 | 2.00 | 2.50 | 1.00 | 2.00 | 25% |" in out
    assert "| centre 8-bit max | 10% | 40.0 (-60.0*) |" in out


def test_a_report_of_other_settings_is_refused(ran: list[str], tmp_path: Path):
    path = tmp_path / "out.json"
    given = [*SMALL, "--methods", "dense", "--tasks", "keys", "--json", str(path)]
    run.run(run.parse([*given, "--count", "10"]))
    with pytest.raises(UsageError, match=r"was made with count=10, not 20; name another --json file"):
        run.run(run.parse([*given, "--count", "20"]))
    path.write_text("{}")
    with pytest.raises(UsageError, match="is no report of this suite"):
        run.run(run.parse([*given, "--count", "10"]))


def test_a_star_is_of_the_difference_that_is_printed():
    """Parts of a score that are lost clearly, though no document was ever right, or ever wrong."""
    dense, sparse = Job("dense", 1.0, 2048), Job("centre", 0.1, 2048)
    full = fake_cell(dense, "pairs", [0.5] * 10)

    def entry(dense_cell: dict[str, Any], scores: list[float]) -> str:
        cell = fake_cell(sparse, "pairs", scores)
        return table({"a": dense_cell, "b": cell}, ["pairs"]).splitlines()[-1].split("|")[3].strip()

    assert entry(full, [0.25] * 10) == "25.0 (-25.0*)"
    assert entry(full, [0.25, 0.75] * 5) == "50.0 (+0.0)"
    # right or wrong: 2 of 10 lost, and none won, is within chance, though the bootstrap's interval ends at 0
    right = fake_cell(dense, "pairs", [1.0] * 10)
    assert entry(right, [0.0] * 2 + [1.0] * 8) == "80.0 (-20.0)"
    assert entry(right, [0.0] * 7 + [1.0] * 3) == "30.0 (-70.0*)"


def test_repeat_runs_the_cells_of_a_report(ran: list[str], tmp_path: Path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    given = ["--device", "cpu", "--count", "10", "--json", str(first)]
    dense = ["--methods", "dense", "--tasks", "keys", "needle", "--lengths", "2048"]
    sparse = ["--methods", "centre", "--tasks", "needle", "--lengths", "2048", "--budgets", "0.1"]
    assert run.run(run.parse([*given, *dense])) == run.run(run.parse([*given, *sparse])) == 0
    wanted = ran.copy()
    ran.clear()
    assert run.run(run.parse(["--repeat", str(first), "--json", str(second)])) == 0
    assert ran == wanted and len(ran) == 3
    one, two = (json.loads(path.read_text()) for path in (first, second))
    assert one["settings"]["count"] == two["settings"]["count"] == 10
    assert one["cells"] == two["cells"]
    with pytest.raises(UsageError, match="holds the cells to repeat already"):
        run.run(run.parse(["--repeat", str(first), "--json", str(first)]))
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--count", "10"], "--count is not valid with --repeat; leave --count or --repeat out"),
        (["--index-bits", "4"], "--index-bits is not valid with --repeat"),
        ([], "is of another version"),
    ],
)
def test_repeat_refuses_what_it_would_not_look_at(more: list[str], said: str, tmp_path: Path):
    path = tmp_path / "first.json"
    path.write_text('{"settings": {}, "cells": {}}')
    with pytest.raises(UsageError, match=said):
        run.run(run.parse(["--repeat", str(path), *more]))


def _each_wrong() -> Iterator[tuple[str, Any]]:
    """Reports with one thing wrong: each field of settings, cell and costs gone, or of another kind."""
    job = Job("dense", 1.0, 2048)
    settings = vars(run.settings_of(run.parse(["--tasks", "keys"])))
    right = {"settings": settings, "cells": {"a": fake_cell(job, "keys", [1.0])}}
    needed = {"settings": list(settings), "cell": [*vars(job), "task", "score", "scores", "cost"]}
    needed["cost"] = list(right["cells"]["a"]["cost"])
    for part, names in needed.items():
        for name in names:
            for wrong in ({"a": 1}, None):
                if (name, wrong) == ("data", None):
                    continue
                made = json.loads(json.dumps(right))
                cell = made["cells"]["a"]
                held = {"settings": made["settings"], "cell": cell, "cost": cell["cost"]}[part]
                held[name] = wrong
                yield f"{part}.{name}={wrong}", made
                if wrong is None:
                    gone = json.loads(json.dumps(made))
                    cell = gone["cells"]["a"]
                    del {"settings": gone["settings"], "cell": cell, "cost": cell["cost"]}[part][name]
                    yield f"{part} without {name}", gone
    yield "a number", {**right, "cells": {"a": 5}}
    yield "pairs", {**right, "cells": [["a", 5]]}
    yield "no cell", {**right, "cells": {}}
    yield "one more", {**right, "settings": {**settings, "colour": 1}}


@pytest.mark.parametrize(
    ("what", "report"), list(_each_wrong()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_reports_with_something_wrong_are_refused(what: str, report: Any, tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(UsageError, match="is of another version|has no cells") as caught:
        repeated(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "[" * 100_000, '{"settings": [1], "cells": {}}'])
def test_what_is_no_report(text: str, tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="is no report of this suite"):
        repeated(path)


def test_the_folder_of_a_report_is_made(ran: list[str], tmp_path: Path):
    path = tmp_path / "new" / "folder" / "out.json"
    given = [*SMALL, "--count", "10", "--methods", "dense", "--tasks", "keys", "--json", str(path)]
    assert run.run(run.parse(given)) == 0 and len(load(path)[1]) == 1


def test_difference_needs_a_dense_cell():
    job = Job("centre", 0.1, 2048)
    cell = fake_cell(job, "keys", [1.0, 0.0])
    assert difference_of(cell, {"a": cell}) == {}
    dense = fake_cell(Job("dense", 1.0, 2048), "keys", [1.0, 1.0])
    found = difference_of(cell, {"a": cell, "b": dense})["difference"]
    assert found["score"] == found["right"] == -50
    assert difference_of(cell, {"a": cell, "b": {**dense, "length": 4096}}) == {}
    assert "| centre 8-bit max | 10% | 50.0 (-50.0) |" in table({"a": cell, "b": dense}, ["keys"])


def test_names_of_task_groups(tmp_path: Path):
    ruler = run.settings_of(run.parse(["--tasks", "ruler"]))
    assert cells.task_names(ruler)[:5] == ["needle", "keys", "values", "queries", "chain"]
    ruler = run.settings_of(run.parse(["--tasks", "ruler", "--level", "tokens"]))
    assert len(cells.task_names(ruler)) == 13
    assert cells.level_of("auto", "tiny") == "bytes" and cells.level_of("auto", "/data/x") == "tokens"
    (tmp_path / "trec.jsonl").write_text("{}\n")
    own = run.settings_of(run.parse(["--tasks", "longbench", "--data", str(tmp_path)]))
    assert cells.task_names(own) == ["trec"]


def test_help_has_room_for_every_name(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        run.parse(["--help"])
    out = capsys.readouterr().out
    for method in run.methods.ALL:
        assert re.search(rf"^  {method.name} +{re.escape(method.about)}$", out, re.MULTILINE), method.name


def test_the_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "out.json"
    given = [
        *SMALL,
        "--count",
        "2",
        "--methods",
        "dense",
        "lookahead_1",
        "--tasks",
        "keys",
        "--json",
        str(path),
    ]
    assert run.run(run.parse(given)) == 0
    report = json.loads(path.read_text())
    dense, sparse = report["cells"].values()
    assert dense["right"] == 2 and dense["score"] == 1 and dense["low"] > 0.3
    assert sparse["of"] == 2 and sparse["cost"]["bytes_moved_per_block"] >= 0
    assert sparse["cost"]["steps_per_block"] >= 1 and dense["cost"]["bytes_moved_per_block"] == 0
    assert len(sparse["answers"]) == 2 and "difference" in sparse
    assert "### 2048" in capsys.readouterr().out


def test_own_documents_on_the_real_engine(tmp_path: Path):
    mine, path = tmp_path / "my questions.jsonl", tmp_path / "out.json"
    mine.write_text(
        '{"prompt": "The code of mill is 4711.\\n\\nQuestion: What is the code of mill?\\nAnswer:", '
        '"answers": ["4711"], "max_tokens": 32}\n',
        encoding="utf-8-sig",
    )
    given = [*SMALL, "--methods", "dense", "--tasks", str(mine), "--json", str(path)]
    assert run.run(run.parse(given)) == 0
    (cell,) = json.loads(path.read_text())["cells"].values()
    assert (cell["score"], cell["of"], cell["source"]) == (1.0, 1, mine.name)
    assert cell["digest"] == files.digest([mine])


def test_when_lookaheads_ran():
    def forwards(request: str, block: int, steps: int, ahead: int) -> list[Span]:
        return [
            Span("forward", 0.0, 1.0, request, block, step, lookahead=step == ahead)
            for step in (-1, *range(steps))
        ]

    spans = [*forwards("a", 3, 8, 6), *forwards("a", 4, 2, 9), *forwards("b", 3, 4, 1), Span("prefill", 0, 1)]
    assert cells.lookahead_steps(spans) == {
        "lookahead_step": 3.5,
        "steps_after_lookahead": 1.5,
        "lookaheads_by_step": {"1": 1, "6": 1},
    }
    nothing = cells.lookahead_steps(forwards("a", 4, 2, 9))
    assert nothing == {"lookahead_step": None, "steps_after_lookahead": None, "lookaheads_by_step": {}}


def test_the_report_says_how_late_a_late_lookahead_ran(tmp_path: Path):
    """With a fixed number of steps, all of which are there to hide a selection of a short prompt."""
    path = tmp_path / "out.json"
    given = [*SMALL, "--count", "1", "--methods", "lookahead_late", "--tasks", "json", "--json", str(path)]
    assert run.run(run.parse([*given, "--denoising-steps", "8", "--max-tokens", "80"])) == 0
    (cell,) = json.loads(path.read_text())["cells"].values()
    cost = cell["cost"]
    assert cost["blocks"] >= 5 and sum(cost["lookaheads_by_step"].values()) == cost["lookaheads"] >= 4
    assert cost["lookahead_step"] + cost["steps_after_lookahead"] <= 7
    assert all(1 <= int(step) <= 7 for step in cost["lookaheads_by_step"])
    assert cost["steps_after_lookahead"] < 5  # after step 1, which looks ahead by default, come 6

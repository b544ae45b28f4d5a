"""Reports that are gone on with: of which documents their cells are, made where, by one run at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.quality import cells, report, run
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.quality.report import Report, difference_of, load, table, tasks_of
from bench_longctx.quality.report_file import ReportFile, ReportLost
from herald.errors import UsageError
from tests.unit.quality.conftest import SMALL, fake_cell

RESULTS = Path(__file__).parents[3] / "bench_longctx" / "results"
OLDER = ["--methods", "dense", "--tasks", "keys"]


@pytest.fixture
def with_files(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> list[str]:
    """Keys of the cells that were run; they say of which content, as real ones do."""
    run_job = cells.run_job

    def with_digest(job: Job, settings: Settings, tasks: list[str], threads: int, said: Any) -> Iterator[Any]:
        for key, cell in run_job(job, settings, tasks, threads, said):
            digest = cells.digest_of(cell["task"], settings)
            yield key, {**cell, **({"digest": digest} if digest else {})}

    monkeypatch.setattr(cells, "run_job", with_digest)
    return ran


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


OWN = {"prompt": "Say a.", "answers": ["a"]}
RULER = {"input": "Say a.", "outputs": ["a"]}
LONG = {"input": "Who?", "context": "Me.", "answers": ["me"], "all_classes": None}
SQUAD = {"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q", "answers": [{"text": "x"}]}]}]}]}
TOKENS = ["--level", "tokens"]


@pytest.mark.parametrize(
    ("name", "line", "other", "given"),
    [
        ("mine.jsonl", OWN, {**OWN, "answers": ["b"]}, ["--tasks", "{}/mine.jsonl"]),
        ("vt.jsonl", RULER, {**RULER, "outputs": ["b"]}, ["--tasks", "ruler", "--data", "{}"]),
        ("vt/validation.jsonl", RULER, {**RULER, "input": "b"}, ["--tasks", "ruler", "--data", "{}"]),
        ("trec.jsonl", LONG, {**LONG, "context": "b"}, ["--tasks", "longbench", "--data", "{}", *TOKENS]),
        ("dataset2prompt.json", {}, {"trec": "{input}"}, ["--tasks", "longbench", "--data", "{}", *TOKENS]),
        ("squad.json", SQUAD, {**SQUAD, "version": 2}, ["--tasks", "qa_1", "--data", "{}"]),
    ],
)
def test_a_file_that_was_edited_does_not_keep_its_scores(
    with_files: list[str], tmp_path: Path, name: str, line: Any, other: Any, given: list[str]
):
    data, out, again = tmp_path / "data", tmp_path / "r.json", tmp_path / "again.json"
    if name == "dataset2prompt.json":
        write(data / "trec.jsonl", LONG)
    path = write(data / name, line)
    small = [*SMALL, "--count", "10", "--methods", "dense", *(text.format(data) for text in given)]
    assert run.run(run.parse([*small, "--json", str(out)])) == 0 and len(with_files) == 1
    assert run.run(run.parse([*small, "--json", str(out)])) == 0 and len(with_files) == 1
    before = out.read_bytes()
    write(path, other)
    with pytest.raises(
        UsageError, match=r"has scores of other content of the files of task .*; name another"
    ):
        run.run(run.parse([*small, "--json", str(out)]))
    with pytest.raises(UsageError, match="of other content .*; put the files back that it was made of"):
        run.run(run.parse(["--repeat", str(out), "--json", str(again)]))
    assert out.read_bytes() == before and len(with_files) == 1
    write(path, line)
    assert run.run(run.parse(["--repeat", str(out), "--json", str(again)])) == 0 and len(with_files) == 2


def test_a_report_that_does_not_say_of_which_content_is_refused(with_files: list[str], tmp_path: Path):
    path, out = write(tmp_path / "mine.jsonl", OWN), tmp_path / "r.json"
    given = [*SMALL, "--count", "10", "--methods", "dense", "--tasks", str(path), "--json", str(out)]
    run.run(run.parse(given))
    content = json.loads(out.read_text())
    for cell in content["cells"].values():
        del cell["digest"]
    out.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="has scores of other content"):
        run.run(run.parse(given))
    # other tasks go on in it
    assert run.run(run.parse([*given[:-3], "keys", "--json", str(out)])) == 0


def test_other_documents_are_not_compared():
    dense = {**fake_cell(Job("dense", 1.0, 2048), "x.jsonl", [1.0] * 10), "digest": "a"}
    cell = {**fake_cell(Job("centre", 0.1, 2048), "x.jsonl", [0.0] * 10), "digest": "b"}
    assert difference_of(cell, {"a": dense, "b": cell}) == {}
    assert difference_of({**cell, "digest": "a"}, {"a": dense})["difference"]["score"] == -100


def test_every_budget_has_its_row():
    dense = fake_cell(Job("dense", 1.0, 2048), "keys", [1.0] * 10)
    shares = [0.07, 0.02, 0.1, 0.025, 0.002, 0.001, 1 / 3, 0.29]
    made = [fake_cell(Job("centre", share, 2048), "keys", [1.0] * 10) for share in shares]
    bits = [fake_cell(Job("centre", 0.1, 2048, bit, "sum"), "keys", [1.0] * 10) for bit in (16, 4)]
    lines = table({str(i): cell for i, cell in enumerate([*made, *bits, dense])}, ["keys"]).splitlines()[4:]
    rows = [tuple(part.strip() for part in line.split("|")[1:3]) for line in lines]
    percents = ["0.1%", "0.2%", "2%", "2.5%", "7%", "10%", "29%", "33.3333333333%"]
    assert rows == [
        ("dense", "100%"),
        ("centre 16-bit sum", "10%"),
        *(("centre 8-bit max", percent) for percent in percents),
        ("centre 4-bit sum", "10%"),
    ]


@pytest.mark.parametrize("count", [1, 2, 9, 10])
def test_few_documents_have_no_star(count: int):
    """However clear it looks: neither with parts of a score nor with right and wrong."""
    for full, less in ((0.95, 0.5), (1.0, 0.0)):
        dense = fake_cell(Job("dense", 1.0, 2048), "keys", [full] * count)
        cell = fake_cell(Job("centre", 0.1, 2048), "keys", [less] * count)
        assert ("*" in table({"a": dense, "b": cell}, ["keys"])) == (count >= 10)
        difference = difference_of(cell, {"a": dense})["difference"]
        assert difference["score"] == pytest.approx(100 * (less - full))
        assert (difference["score_low"] is None) == (difference["score_high"] is None) == (count < 10)
        assert difference["right_low"] < difference["right_high"]


def test_a_run_that_goes_on_says_nothing_of_the_cells_before_it(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "r.json"
    small = [*SMALL, "--count", "10", "--methods", "dense", "--json", str(path)]
    here = {"commit": "1", "cpu": "A", "versions": {"torch": "2.8"}}
    monkeypatch.setattr(report.machine, "describe", lambda: dict(here))
    run.run(run.parse([*small, "--tasks", "keys", "values"]))
    first = json.loads(path.read_text())
    assert first["machine"] == here and first["jobs"] == 1
    here |= {"commit": "2", "versions": {"torch": "2.9"}}
    # nothing to run: nothing is written
    before = path.read_bytes()
    run.run(run.parse([*small, "--tasks", "keys"]))
    assert path.read_bytes() == before
    run.run(run.parse([*small, "--tasks", "chain", "keys", "--batch", "3"]))
    second = json.loads(path.read_text())
    assert second["settings"] == {**first["settings"], "tasks": ["keys", "values", "chain"]}
    assert (second["machine"], second["jobs"]) == (first["machine"], 1)
    last = second["cells"].pop("dense 1.0 2048 8 max 0 chain")
    assert second["cells"] == first["cells"]
    assert last["machine"] == {"commit": "2", "versions": {"torch": "2.9"}} and last["batch"] == 3
    assert "jobs" not in last
    settings, found = load(path)
    assert tasks_of(settings, found) == ["keys", "values", "chain"]
    with Report(run.settings_of(run.parse([*small, "--tasks", "json"])), path, jobs=4) as more:
        more.add("a", fake_cell(Job("dense", 1.0, 2048), "json", [1.0] * 10))
    assert load(path)[1]["a"]["jobs"] == 4
    # cells of settings of this version, which a report of another one may lack the rest of
    path.write_text(json.dumps({"settings": second["settings"], "cells": {}}))
    run.run(run.parse([*small, "--tasks", "keys"]))
    (only,) = load(path)[1].values()
    assert only["machine"] == here and only["jobs"] == 1


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("quality_*.json")))
def test_the_measured_reports_are_gone_on_with(ran: list[str], tmp_path: Path, name: str):
    """Their cells and what is said of these stay as they are; so does every difference and star."""
    path = tmp_path / name
    shutil.copy(RESULTS / name, path)
    before = json.loads(path.read_text())
    settings = before["settings"]
    given = [
        "--device",
        settings["device"],
        "--count",
        str(settings["count"]),
        "--seed",
        str(settings["seed"]),
    ]
    given += ["--methods", "dense", "--lengths", "2048", "--tasks", "needle", "--json", str(path)]
    assert run.run(run.parse(given)) == 0 and ran == ["dense 1.0 2048 8 max 0 needle"]
    after = json.loads(path.read_text())
    added = after["cells"].pop(ran[0])
    tasks = list(dict.fromkeys([*settings["tasks"], "needle"]))
    assert after["settings"] == {**settings, "tasks": tasks}
    assert (after["machine"], after["jobs"]) == (before["machine"], before["jobs"])
    assert added.get("jobs", before["jobs"]) == 1
    for key, cell in before["cells"].items():
        assert {**after["cells"][key], "difference": None} == {**cell, "difference": None}
        if "difference" in cell:
            assert after["cells"][key]["difference"] == pytest.approx(cell["difference"], abs=1e-3)


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("quality_*.json")))
def test_the_measured_reports_can_be_repeated(ran: list[str], name: str):
    path = RESULTS / name
    assert run.run(run.parse(["--repeat", str(path)])) == 0
    assert set(ran) == set(load(path)[1]) and len(ran) == len(load(path)[1])


def test_one_run_at_a_time_writes_a_report(ran: list[str], tmp_path: Path):
    path = tmp_path / "r.json"
    settings = run.settings_of(run.parse([*SMALL, *OLDER, "--count", "10"]))
    given = [*SMALL, *OLDER, "--count", "10", "--json", str(path)]
    with Report(settings, path) as held:
        with pytest.raises(UsageError, match=r"another run is writing .*r.json; wait for its end, or name"):
            run.run(run.parse(given))
        held.add("a", fake_cell(Job("dense", 1.0, 4096), "keys", [1.0] * 10))
    assert ran == [] and [entry.name for entry in tmp_path.iterdir()] == ["r.json"]
    assert run.run(run.parse(given)) == 0 and len(load(path)[1]) == 2
    # the lock of a run that was killed holds nothing up
    (tmp_path / "r.json.lock").touch()
    assert run.run(run.parse([*given, "--lengths", "1024"])) == 0 and len(load(path)[1]) == 3
    # nor does that of a run whose report was refused
    with pytest.raises(UsageError, match="was made with count"):
        run.run(run.parse([*given, "--count", "11"]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


def test_two_names_of_one_file(ran: list[str], tmp_path: Path):
    """A link keeps leading to the report, and does not let a second run in."""
    path, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(path)
    given = [*SMALL, *OLDER, "--count", "10", "--json", str(link)]
    assert run.run(run.parse(given)) == 0
    assert link.is_symlink() and len(load(path)[1]) == 1
    with closing(ReportFile(path)), pytest.raises(UsageError, match="another run is writing .*link.json"):
        run.run(run.parse(given))


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between opening the side file and locking it another run may end, and remove it."""
    path, beside = tmp_path / "r.json", tmp_path / "r.json.lock"
    flock = fcntl.flock
    tries: list[int] = []

    def late(lock: int, how: int) -> None:
        tries.append(lock)
        if len(tries) == 1:
            beside.unlink()
        flock(lock, how)

    monkeypatch.setattr("bench_longctx.quality.report_file.fcntl.flock", late)
    file = ReportFile(path)
    assert len(tries) == 2 and beside.exists()
    with pytest.raises(UsageError, match="another run"):
        ReportFile(path)
    file.close()
    file.close()
    assert not beside.exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/dev/full", "--json /dev/full cannot be written: it is not a regular file; name another file"),
        ("/dev/zero", "/dev/zero cannot be written: it is not a regular file"),
        ("/proc/x.json", "/proc/x.json cannot be written"),
        ("{}/" + "x" * 300 + ".json", "cannot be written: File name too long"),
        ("{}/" + "x" * 252, "cannot hold the report"),
        ("{}", "it is a folder; name another file"),
        ("{}/pipe", "it is not a regular file"),
        ("{}/a\0b", "cannot be written: embedded null byte"),
        ("/dev/null/out.json", "/dev/null is no folder"),
    ],
)
def test_what_cannot_hold_a_report_is_refused_at_once(
    ran: list[str], tmp_path: Path, target: str, said: str, capsys: pytest.CaptureFixture
):
    os.mkfifo(tmp_path / "pipe")
    given = [*SMALL, *OLDER, "--count", "10", "--json", target.format(tmp_path)]
    with pytest.raises(UsageError, match=said) as caught:
        run.run(run.parse(given))
    assert "\n" not in str(caught.value)
    assert run.main(given) == 2 and capsys.readouterr().err.startswith("error: ")
    assert ran == [] and [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_no_room_for_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]):
    """What was there stays, what is finished is printed, and no other job is begun."""
    path = tmp_path / "r.json"
    given = [*SMALL, "--methods", "dense", "centre", "--tasks", "keys", "--count", "10", "--json", str(path)]

    def full(self: Path, text: str, encoding: str) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    run.run(run.parse([*given, "--lengths", "1024"]))
    before = path.read_bytes()
    ran.clear()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ReportLost, match=r"r.json cannot be written .*; make room and run again"):
        run.run(run.parse(given))
    assert path.read_bytes() == before and len(ran) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]

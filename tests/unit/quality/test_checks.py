"""What is refused before the first cell: no model is loaded, and the remedy is one that works."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.quality import run
from bench_longctx.quality.metrics import METRICS
from bench_longctx.tasks import TASKS, ruler, structured
from herald.errors import HeraldError
from tests.unit.quality.conftest import SMALL

OWN = {"prompt": "Say a.", "answers": ["a"]}
LONG = {"input": "Who?", "context": "Me.", "answers": ["me"], "all_classes": None}


def refused(given: list[str], ran: list[str]) -> str:
    with pytest.raises(HeraldError) as caught:
        run.run(run.parse(given))
    assert ran == [] and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--methods", "best"], "method='best' is not known"),
        (["--tasks", "poem"], "task='poem' is not generated in bytes"),
        (["--level", "tokens", "--tasks", "needle"], "task='needle' is not generated in tokens"),
        (["--tasks", "longbench"], "--tasks longbench needs its files; add --data DIR"),
        (["--tasks", "none.jsonl"], "none.jsonl is not there"),
        (["--operator", "mean-max"], "use --index-bits 16"),
        (["--budgets", "0"], "kv_budget=0.0 is not valid"),
        (["--count", "0"], "--count 0 is not valid"),
        (["--batch", "0"], "--batch 0 is not valid"),
        (["--threads", "-1"], "--threads -1 is not valid"),
        (["--min-resident-rows", "-1"], "min_resident_rows=-1 is not valid"),
        (["--max-tokens", "0"], "max_tokens=0 is not valid"),
        (["--threshold", "2"], "confidence_threshold=2.0 is not valid"),
        (["--denoising-steps", "-1"], "denoising_steps=-1 is not valid"),
        (["--lookahead-step", "0", "--methods", "lookahead_k"], "lookahead_step=0 is not valid"),
        (["--seed", "-1"], "seed=-1 is not valid"),
        (["--device", "tpu"], "device='tpu' is not valid"),
        (["--dtype", "int8"], "dtype='int8' is not valid"),
        (["--model", "nowhere"], "there is no model 'nowhere'"),
        (["--tasks", "ruler", "--data", "nowhere"], "--data nowhere is not a folder"),
    ],
)
def test_refusals_come_before_any_model(ran: list[str], given: list[str], message: str):
    assert message in refused(given, ran)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lookahead-step", "5"], "--lookahead-step is unused by dense, lookahead_1; leave it out, or use"),
        (["--operator", "sum", "--methods", "page_bounds"], "--operator is unused by page_bounds; leave it"),
        (
            ["--operator", "max", "--methods", "window_sinks", "dense"],
            "--operator is unused by dense, window",
        ),
        (
            ["--index-bits", "4", "--methods", "partial_keys", "page_bounds"],
            "--index-bits is unused by partial",
        ),
        (["--data", "{}"], "is unused by --tasks keys; leave it out, or use --tasks ruler or longbench"),
        (["--data", "{}", "--tasks", "qa_1"], "is unused by --tasks qa_1"),
        (["--data", "{}", "--tasks", "{}/mine.jsonl", "keys"], "is unused by --tasks"),
    ],
)
def test_what_nothing_looks_at_is_refused(ran: list[str], given: list[str], message: str, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text(json.dumps(OWN))
    usual = [*SMALL, "--methods", "dense", "lookahead_1", "--tasks", "keys"]
    assert message in refused([*usual, *(text.format(tmp_path) for text in given)], ran)


@pytest.mark.parametrize("task", [*TASKS, *structured.TASKS, "cwe", "fwe", "qa_1", "vt"])
def test_lengths_that_the_model_does_not_have(ran: list[str], task: str):
    """A prompt that was cut to fit would bear the name of a length that it has not."""
    given = ["--methods", "dense", "--tasks", task, "--count", "1"]
    for length in ("32769", "65536"):
        said = refused([*given, "--lengths", "2048", length], ran)
        assert said.startswith(f"--lengths {length} is not valid: tiny has 32,768 positions")
        assert said.endswith("use --lengths 32768 or less")
    assert "--lengths 0 is not valid" in refused([*given, "--lengths", "0"], ran)
    assert run.run(run.parse([*given, "--lengths", "32768"])) == 0


@pytest.mark.parametrize("length", [4096, 32768])
def test_answers_that_leave_no_room_name_the_longest(ran: list[str], length: int):
    for tokens in (32700, 40_000):
        given = ["--methods", "dense", "--tasks", "keys", "--count", "1", "--lengths", str(length)]
        said = refused([*given, "--max-tokens", str(tokens)], ran)
        assert f"--max-tokens {tokens} leaves" in said and f"--lengths {length}; " in said
        longest = re.search(r"use --max-tokens (\d+) or less", said)
        assert longest is not None
        assert run.run(run.parse([*given, "--max-tokens", longest[1]])) == 0
        ran.clear()
        refused([*given, "--max-tokens", str(int(longest[1]) + 1)], ran)


@pytest.mark.parametrize("level", ["bytes", "tokens"])
def test_lengths_without_room_for_a_task(ran: list[str], level: str):
    """The fifth task of a group has no room: that is known before the first one is asked."""
    given = [*SMALL, "--methods", "dense", "--tasks", "ruler", "--level", level, "--lengths", "8192", "1024"]
    said = refused([*given, "--count", "3"], ran)
    assert re.match(
        "task='(cwe|vt)': a length of 1024 is too short; at least .* use a longer --lengths", said
    )
    assert "at least" in refused([*SMALL, "--tasks", "json", "--lengths", "600"], ran)


@pytest.mark.parametrize("task", [*TASKS, *structured.TASKS, *(ruler.TASKS[-6:-2])])
def test_what_is_let_through_can_be_made(ran: list[str], task: str):
    """Of the shortest lengths that are let through, every document has room."""
    for length in range(500, 4500, 250):
        args = run.parse(
            [*SMALL, "--methods", "dense", "--tasks", task, "--lengths", str(length), "--count", "4"]
        )
        try:
            run.run(args)
        except HeraldError:
            continue
        break
    else:
        pytest.fail("no length has room")
    settings, form = run.settings_of(args), run.cells.BytesForm()
    assert len(run.cells.cases_of(task, length, settings, form, 32768)) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**OWN, "prompt": "p" * 3000}, ":1: the prompt has 3000 bytes, more than 2048; use --lengths 3000"),
        (
            {**OWN, "max_tokens": 40_000},
            "case 1 of {} has a prompt of 6 tokens, which with max_tokens=40,000 is more than the 32,768",
        ),
        ({**OWN, "metric": "bleu"}, "metric='bleu' is not known"),
        (
            {**OWN, "answer": "a"},
            ":1: 'answer' is not known; use prompt, answers, metric, max_tokens, classes",
        ),
    ],
)
def test_own_files_are_read_first(ran: list[str], line: dict[str, Any], message: str, tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(line))
    # the task before it would have been run for nothing
    said = refused([*SMALL, "--tasks", "keys", str(path), "--methods", "dense"], ran)
    assert message.format(path) in said


def test_published_files_are_read_first(ran: list[str], tmp_path: Path):
    (tmp_path / "vt.jsonl").write_text(json.dumps({"input": "x" * 3000, "outputs": ["a"]}))
    given = [*SMALL, "--methods", "dense", "--tasks", "ruler", "--data", str(tmp_path)]
    assert "the prompt has 3000 bytes, more than 2048" in refused(given, ran)
    (tmp_path / "vt.jsonl").write_text(json.dumps({"input": "x", "outputs": ["a"]}))
    assert "task='poem' is not generated in bytes" in refused([*given, "--tasks", "ruler", "poem"], ran)
    (tmp_path / "trec.jsonl").write_text("{}")
    longbench = [*SMALL, "--methods", "dense", "--tasks", "longbench", "--data", str(tmp_path)]
    assert "longbench is asked in tokens; use --level tokens" in refused(longbench, ran)
    assert "trec.jsonl:1: 'context' is missing" in refused([*longbench, "--level", "tokens"], ran)


def test_both_groups_find_their_files(ran: list[str], tmp_path: Path):
    (tmp_path / "niah_single_1").mkdir()
    line = {"input": "x", "outputs": ["a"]}
    (tmp_path / "niah_single_1" / "validation.jsonl").write_text(json.dumps(line))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trec.jsonl").write_text(json.dumps(LONG))
    given = [*SMALL, "--methods", "dense", "--tasks", "ruler", "longbench", "--data", str(tmp_path)]
    assert run.run(run.parse([*given, "--level", "tokens"])) == 0
    assert [key.split()[-1] for key in ran] == ["niah_single_1", "trec"]


@pytest.mark.parametrize("metric", sorted(set(METRICS) - {"json", "pairs"}))
def test_packages_of_metrics_are_asked_for_first(
    ran: list[str], metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With both packages gone: what is let through scores without them, what is refused does not."""
    for name in ("rouge", "jieba"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({**OWN, "metric": metric, "classes": ["a"]}))
    given = [*SMALL, "--methods", "dense", "--tasks", "keys", str(path)]
    case = run.cells.files.own_cases(path, 1, run.cells.BytesForm(), 100)[0]
    try:
        METRICS[metric]("a", case)
    except HeraldError:
        said = refused(given, ran)
        assert re.search("this metric needs the package '(rouge|jieba)'; run: pip install", said)
    else:
        assert run.run(run.parse([*given, "--count", "1"])) == 0


def test_files_of_one_name_are_told_apart(ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    paths = [tmp_path / name / "x.jsonl" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps(OWN))
    tasks = [str(path) for path in paths]
    assert run.run(run.parse([*SMALL, "--methods", "dense", "--tasks", *tasks, "keys"])) == 0
    assert f"| method | KV | {tasks[0]} | {tasks[1]} | keys |" in capsys.readouterr().out


def test_a_folder_with_the_name_of_a_file(ran: list[str], tmp_path: Path):
    (tmp_path / "x.jsonl").mkdir()
    said = refused([*SMALL, "--tasks", str(tmp_path / "x.jsonl")], ran)
    assert said == f"{tmp_path / 'x.jsonl'} is a folder; name a JSONL file in it"

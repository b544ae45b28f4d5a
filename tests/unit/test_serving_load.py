"""What the load benchmark sends, and what it reads from the load generator's report."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.serving import dataset, report, run
from bench_longctx.serving.report import TIMES, draw, line, summary


def common(texts: list[str]) -> int:
    """Characters that all texts begin with."""
    return next((i for i, each in enumerate(zip(*texts)) if len(set(each)) > 1), min(map(len, texts)))


def test_questions_of_a_document_share_its_text() -> None:
    many = dataset.requests(3, 4, 2000, 32, seed=1, order="grouped")
    assert len(many) == 12 and len({each["id"] for each in many}) == 12
    assert all(each["output_tokens_count"] == each["output_tokens"] == 32 for each in many)
    groups = [[each for each in many if each["document"] == number] for number in range(3)]
    for group in groups:
        prompts = [each["prompt"] for each in group]
        assert len(set(prompts)) == 4 and all(1000 < len(text.encode()) <= 2000 for text in prompts)
        assert common(prompts) > 0.8 * min(map(len, prompts))
        for each in group:
            assert each["answer"] in each["prompt"]
    assert common([group[0]["prompt"] for group in groups]) < 200


def test_orders_hold_the_same_requests() -> None:
    grouped, turns, shuffled = (
        dataset.requests(3, 2, 1500, 8, seed=2, order=order) for order in ("grouped", "turns", "shuffled")
    )
    assert [each["document"] for each in turns] == [0, 1, 2, 0, 1, 2]
    key = json.dumps
    assert sorted(map(key, grouped)) == sorted(map(key, turns)) == sorted(map(key, shuffled))
    assert grouped != shuffled
    assert grouped == dataset.requests(3, 2, 1500, 8, seed=2, order="grouped")


# Reports of GuideLLM 0.8.1 with the fields that are read: a rate at which the server refused every request
# (4 a second), one at which it answered all, a quarter of them with nothing cached (0.5), and one at which
# GuideLLM sent all at once (0.1).
REPORTS = Path(__file__).parent / "guidellm_report.json"
REPORT: dict[str, Any] = json.loads(REPORTS.read_text("utf-8"))
REPORT["benchmarks"].pop()  # the last one is for ``run`` to refuse


def test_a_report_in_a_few_numbers() -> None:
    answered, refused = summary(REPORT)
    assert (answered["rate"], refused["rate"]) == (0.5, 4.0)
    assert (answered["requests"], answered["failed"], answered["first_error"]) == (12, 0, None)
    sent = REPORT["benchmarks"][1]["requests"]["successful"]
    for name, field, scale in (
        ("latency_seconds", "request_latency", 1.0),
        ("first_block_seconds", "time_to_first_output_token_ms", 1e-3),
        ("per_output_token_seconds", "time_per_output_token_ms", 1e-3),
    ):
        values = sorted(each[field] * scale for each in sent)
        assert answered[name]["mean"] == pytest.approx(sum(values) / 12, rel=1e-3)
        assert values[5] - 1e-6 <= answered[name]["p50"] <= values[6] + 1e-6
        assert values[9] - 1e-6 <= answered[name]["p90"] <= answered[name]["p99"] <= values[11] + 1e-6
    assert answered["cached_share"] == pytest.approx(9 * 7680 / sum(each["prompt_tokens"] for each in sent))
    starts = [each["request_start_time"] for each in sent]
    assert answered["sent_per_second"] == pytest.approx(11 / (max(starts) - min(starts)))
    assert "0.50/s asked for, 0.60/s sent" in line(answered), "what was sent, beside what was asked for"
    assert 0 < answered["behind_schedule_seconds"] < 0.1
    assert "74% of the prompts cached" in line(answered)


def test_the_caller_may_ask_for_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUIDELLM__MAX_WORKER_PROCESSES", "4")
    assert run.environment()["GUIDELLM__MAX_WORKER_PROCESSES"] == "4"


def test_no_answer_is_no_latency(tmp_path: Path) -> None:
    refused = summary(REPORT)[1]
    assert (refused["requests"], refused["failed"], refused["cached_share"]) == (0, 3, None)
    assert "404" in refused["first_error"] and "404" in line(refused) and "p50" not in line(refused)
    for name in TIMES:
        assert set(refused[name].values()) == {None}
    draw({"tiny": summary(REPORT)}, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_does_not_say_what_it_had_cached_and_one_request() -> None:
    whole = copy.deepcopy(REPORT)
    for each in whole["benchmarks"][1]["requests"]["successful"]:
        each["cached_tokens"] = None
    del whole["benchmarks"][1]["requests"]["successful"][1:]
    row = summary(whole)[0]
    assert row["cached_share"] is None and "cached" not in line(row)
    assert row["sent_per_second"] is None and "0.50/s sent" in line(row), "one request has no rate"


def test_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ({"rates": summary(REPORT), "seed": seed} for seed in (1, 2))
    (tmp_path / "a.json").write_text(json.dumps(one), "utf-8")
    (tmp_path / "b.json").write_text(json.dumps(two), "utf-8")
    where = ["--json", str(tmp_path / "both.json"), "--plot", str(tmp_path / "both.png")]
    argv = ["report", *where, f"shared={tmp_path / 'a.json'}", f"alone={tmp_path / 'b.json'}"]
    monkeypatch.setattr("sys.argv", argv)
    report.main()
    assert json.loads((tmp_path / "both.json").read_text("utf-8")) == {"shared": one, "alone": two}
    first = (tmp_path / "both.png").read_bytes()
    monkeypatch.setattr("sys.argv", ["report", *where])
    report.main()
    assert (tmp_path / "both.png").read_bytes() == first
    monkeypatch.setattr("sys.argv", ["report", *where, str(tmp_path / "a.json")])
    with pytest.raises(SystemExit):
        report.main()


def tool_in(folder: Path, fails_at: float = -1.0) -> Path:
    """A stand-in for GuideLLM: checks what it is given, writes a report; fails at one rate."""
    tool = folder / "guidellm"
    tool.write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys\n"
        "spec = json.loads(pathlib.Path(sys.argv[3]).read_text())['spec']\n"
        f"if spec['profile']['rate'] == [{fails_at!r}]: sys.exit(3)\n"
        "data = pathlib.Path(spec['data'][0]['path']).read_text().splitlines()\n"
        "assert spec['constraints'][0]['count'] == len(data)\n"
        "assert os.environ['GUIDELLM__MAX_WORKER_PROCESSES'] == '1'\n"
        f"report = json.loads(pathlib.Path({str(REPORTS)!r}).read_text())\n"
        "which = ('other', 'tiny', 'burst').index(spec['backend']['model'])\n"
        "report['benchmarks'] = [report['benchmarks'][which]]\n"
        "report['benchmarks'][0]['config']['strategy']['rate'] = spec['profile']['rate'][0]\n"
        "pathlib.Path(spec['outputs'][0]['path']).write_text(json.dumps(report))\n"
    )
    tool.chmod(0o755)
    return tool


SMALL = ("--documents", "2", "--questions", "2", "--bytes", "1500")


def load(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, Any]:
    """What ``run`` leaves in ``out``."""
    monkeypatch.setattr("sys.argv", ["run", "--out", str(out), *options])
    run.main()
    found: dict[str, Any] = json.loads((out / "summary.json").read_text("utf-8"))
    return found


def test_what_the_load_generator_is_told(tmp_path: Path) -> None:
    args = run._parser().parse_args(["--out", str(tmp_path), "--rates", "1,2.5", "--api-key", "k"])
    assert args.rates == [1.0, 2.5]
    spec = run.configuration(args, 2.5, tmp_path, 48)["spec"]
    assert spec["profile"] == {"kind": "poisson", "rate": [2.5]}
    assert spec["backend"]["api_key"] == "k" and spec["constraints"][0]["count"] == 48


@pytest.mark.parametrize("rates", ["0,1", "1,1.0", "-1"])
def test_rates_that_are_none(rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run._parser().parse_args(["--out", str(tmp_path), f"--rates={rates}"])
    assert "such as 0.5,1,2" in capsys.readouterr().err


def test_a_run_and_its_picture_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, tool = tmp_path / "load", tool_in(tmp_path)
    whole = load(monkeypatch, out, "--guidellm", str(tool), "--rates", "4,0.5", "--api-key", "k", *SMALL)
    sent = [(out / rate / "requests.jsonl").read_text("utf-8").splitlines() for rate in ("0.5", "4")]
    assert [len(each) for each in sent] == [4, 4] and not set(sent[0]) & set(sent[1])
    assert [row["rate"] for row in whole["rates"]] == [0.5, 4.0] and whole["machine"]["cores"]
    assert whole["options"]["questions"] == 2 and "k" not in whole["options"].values()
    assert whole["guidellm"] == "0.8.1"
    (out / "latency.png").unlink()
    assert load(monkeypatch, out, "--plot-only") == whole, "the options are those of the run"
    assert (out / "latency.png").exists()
    # Another run in the same folder: what an earlier one left is not of it.
    again = load(monkeypatch, out, "--guidellm", str(tool), "--rates", "2", *SMALL)
    assert [row["rate"] for row in again["rates"]] == [2.0]


def test_a_run_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "load"
    with pytest.raises(SystemExit, match="pipx install guidellm"):
        load(monkeypatch, out, "--guidellm", "no-such-program")
    with pytest.raises(SystemExit, match="run without --plot-only first"):
        load(monkeypatch, out, "--plot-only")
    tool = tool_in(tmp_path, fails_at=4.0)
    with pytest.raises(SystemExit, match="no request succeeded"):
        load(monkeypatch, out, "--guidellm", str(tool), "--rates", "1", "--model", "other", *SMALL)
    with pytest.raises(SystemExit, match=r"behind schedule, allowed is 10\.00 s"):
        load(monkeypatch, out, "--guidellm", str(tool), "--rates", "0.1", "--model", "burst", *SMALL)
    assert not (out / "0.1" / "report.json").exists(), "its latencies are not those of the rate"
    with pytest.raises(SystemExit, match="status 3 at 4/s"):
        load(monkeypatch, out, "--guidellm", str(tool), "--rates", "2,4", *SMALL)
    rows = json.loads((out / "summary.json").read_text("utf-8"))["rates"]
    assert [row["rate"] for row in rows] == [2.0], "what was measured before it failed is kept"

"""What the load benchmark sends, and what it reads from the load generator's report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.serving import dataset, run
from bench_longctx.serving.report import draw, summary


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


def benchmark(rate: float, latency: float) -> dict[str, Any]:
    """One benchmark of a report, with the fields that are read."""

    def spread(value: float) -> dict[str, Any]:
        return {"mean": value, "percentiles": {"p50": value, "p90": 2 * value, "p99": 3 * value}}

    return {
        "config": {"strategy": {"rate": rate}},
        "metrics": {
            "request_totals": {"successful": 5, "errored": 1, "incomplete": 2, "total": 8},
            "requests_per_second": {"successful": {"mean": rate}},
            "output_tokens_per_second": {"total": {"mean": 10 * rate}},
            "request_concurrency": {"total": {"mean": 1.5}},
            "request_latency": {"successful": spread(latency)},
            "time_to_first_output_token_ms": {"successful": spread(1000 * latency)},
            "time_per_output_token_ms": {"successful": spread(latency)},
        },
    }


def test_a_report_in_a_few_numbers(tmp_path: Path) -> None:
    rows = summary({"benchmarks": [benchmark(2.0, 0.5), benchmark(1.0, 0.25)]})
    assert [row["rate"] for row in rows] == [1.0, 2.0]
    assert rows[0]["failed"] == 3 and rows[0]["requests"] == 5
    assert rows[0]["latency_seconds"] == {"mean": 0.25, "p50": 0.25, "p90": 0.5, "p99": 0.75}
    assert rows[0]["first_block_seconds"]["p99"] == pytest.approx(0.75)
    assert rows[0]["per_output_token_seconds"]["mean"] == pytest.approx(0.00025)
    draw(rows, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_load_generator_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "load"
    args = run._parser().parse_args(["--out", str(out), "--rates", "1,2.5", "--api-key", "k"])
    assert args.rates == [1.0, 2.5]
    spec = run.configuration(args, 2.5, tmp_path, 48)["spec"]
    assert spec["profile"] == {"kind": "poisson", "rate": [2.5]}
    assert spec["backend"]["api_key"] == "k" and spec["constraints"][0]["count"] == 48
    with pytest.raises(SystemExit, match="pipx install guidellm"):
        monkeypatch.setattr("sys.argv", ["run", "--out", str(out), "--guidellm", "no-such-program"])
        run.main()
    # A stand-in for the tool: it checks what it is given and writes a report.
    tool = tmp_path / "guidellm"
    report = json.dumps({"benchmarks": [benchmark(0.5, 0.1)]})
    tool.write_text(
        f'#!/bin/sh\nat=$(dirname "$3")\n'
        f"test -s $at/requests.jsonl && test -s \"$3\" && echo '{report}' > $at/report.json\n"
    )
    tool.chmod(0o755)
    small = [
        "--documents",
        "2",
        "--questions",
        "2",
        "--bytes",
        "1500",
        "--seed",
        str(random.Random(0).random())[2:5],
    ]
    argv = ["run", "--out", str(out), "--guidellm", str(tool), "--rates", "0.5,4", *small]
    monkeypatch.setattr("sys.argv", argv)
    run.main()
    sent = [(out / rate / "requests.jsonl").read_text("utf-8").splitlines() for rate in ("0.5", "4")]
    assert [len(each) for each in sent] == [4, 4] and not set(sent[0]) & set(sent[1])
    whole = json.loads((out / "summary.json").read_text("utf-8"))
    assert [row["rate"] for row in whole["rates"]] == [0.5, 0.5] and whole["machine"]["cores"]
    assert whole["options"]["questions"] == 2 and "k" not in whole["options"].values()
    assert (out / "latency.png").exists()

"""`herald profile` from its arguments to its files, on a small checkpoint."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial
from pathlib import Path

import pytest

from herald.cli import profile
from herald.cli.main import main
from herald.cli.progress import ProgressLines
from herald.profile import perfetto, timeline
from tests.support.trace_file import check_trace

GOLDEN = Path(__file__).parents[2] / "golden" / "sdar_b8"
WORKLOAD = [
    "--model",
    str(GOLDEN),
    "--device",
    "cpu",
    "--tokens",
    "700",
    "--new-tokens",
    "40",
    "--steps",
    "4",
]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(["profile", *argv])
    except SystemExit as exit_info:
        code = int(exit_info.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_three_files_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *WORKLOAD, "--num-requests", "2", "--out", str(tmp_path / "new" / "folder"))
    assert code == 0
    assert "median" in out and "compute busy" in out
    folder = tmp_path / "new" / "folder"
    report = json.loads((folder / "summary.json").read_text("utf-8"))
    summary = report["summary"]
    assert report["workload"]["prompt_tokens"] == [700, 700]
    assert (report["workload"]["model"], report["workload"]["family"]) == (str(GOLDEN), "sdar")
    # 700 tokens are 87 blocks of 8 and a half; 40 more end in block 92.
    blocks = {(block["request_id"], block["block"]) for block in summary["blocks"]}
    assert len(blocks) == 12 and {block for _, block in blocks} == set(range(87, 93))
    # The last block ends as soon as its first four positions are committed.
    assert all(block["steps"] == 4 for block in summary["blocks"] if 87 < block["block"] < 92)
    assert 0 < summary["compute_busy_share"] <= 1 and 0 <= summary["overlap"]["overlap_ratio"] <= 1
    assert summary["bytes_moved"] > 0 and summary["copy_gb_per_second"] > 0
    # Of 2 layers and 2 KV heads, without 4 sinks and a window of 64: 16 codes a row, and 1/64 of what a page
    # has, a mean of two times 16 codes and two scales.
    rows = 2 * 2 * sum(8 * block - 64 - 4 for block in range(88, 93))
    assert summary["index_bytes_scanned"] == 2 * rows * (16 + (2 * 16 + 2 * 4) / 64)
    assert summary["selection_gb_per_second"] > 0
    with gzip.open(folder / "trace.json.gz", "rt", encoding="utf-8") as file:
        trace = json.load(file)
    assert trace["otherData"] == report["workload"]
    events = trace["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    # Whether anything was waited for is up to the machine.
    assert kinds | {"wait"} == {"prefill", "forward", "selection", "transfer", "write_back", "index", "wait"}
    check_trace(events)
    phases = [event["ph"] for event in events]
    assert phases.count("s") == phases.count("f") == 10
    assert (folder / "timeline.png").exists() == timeline.can_draw()


def test_json_is_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a question", encoding="utf-8")
    argv = ["--json", "--out", str(tmp_path), "--model", "tiny", "--device", "cpu", "--new-tokens", "20"]
    code, out, _ = run(capsys, "--prompt-file", str(prompt), "--steps", "2", *argv)
    assert code == 0 and out == (tmp_path / "summary.json").read_text("utf-8")
    workload = json.loads(out)["workload"]
    assert workload["prompt_tokens"] == [len("a question")]
    assert (workload["model"], workload["family"]) == ("tiny", "sdar")


def test_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "can_draw", lambda: False)
    code, _, err = run(capsys, *WORKLOAD, "--out", str(tmp_path))
    assert code == 0
    assert err == "herald: no timeline.png: matplotlib is missing; run: pip install 'herald-dllm[profile]'\n"
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json.gz", "summary.json"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "--tokens=0 is not valid; use 1 or more"),
        (["--num-requests", "0"], "--num-requests=0 is not valid"),
        (["--new-tokens", "0"], "--new-tokens=0 is not valid"),
        (["--kv-budget", "2"], "--kv-budget=2.0 is not valid"),
        (["--out", __file__], "is not a folder"),
        (["--out", "/dev/null/x"], "is not a folder"),
        (["--out", "x" * 300], "cannot be written (File name too long); name another folder"),
        (["--steps", "17"], "--steps=17 is not valid; use at most 16, the positions of a block"),
        (["--device", "cpu", "--cache", "dual"], "--cache=dual is not valid; use 'auto'"),
        (["--tokens", "5", "--prompt-file", "x"], "not allowed with"),
        (["--prompt-file", "/nonexistent"], "does not exist"),
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--tokens", "999999999999"], "exceed the limit of 32,768; use at most 32,768"),
    ],
)
def test_usage_errors(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--out", str(tmp_path), *argv)
    assert (code, out) == (2, "")
    assert err.startswith("herald: error: ") and message in err and err.count("\n") == 1


def test_the_pool_named_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the run and not of its warm-up, which is shorter."""
    argv = [
        "--device",
        "cpu",
        "--tokens",
        "1500",
        "--new-tokens",
        "16",
        "--steps",
        "1",
        "--out",
        str(tmp_path),
    ]
    code, _, err = run(capsys, *argv, "--host-memory", "1KiB")
    assert code == 1 and "the prompt of 1,500 tokens" in err
    named = re.search(r"; use (--host-memory=\d+)$", err.strip())
    assert named is not None
    assert run(capsys, *argv, named[1])[0] == 0


def test_a_run_whose_files_fail_has_printed_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(perfetto, "write_trace", full)
    code, out, err = run(capsys, *WORKLOAD, "--out", str(tmp_path))
    assert code == 1 and "compute busy" in out and "Written to" not in out
    assert "No space left on device; free space" in err


def test_a_run_whose_output_fails_has_written_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "print_summary", full)
    code, _, err = run(capsys, *WORKLOAD, "--out", str(tmp_path))
    assert code == 1 and "No space left on device; free space" in err
    assert {path.name for path in tmp_path.iterdir()} >= {"trace.json.gz", "summary.json"}


def test_a_log_sees_a_long_prefill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "ProgressLines", partial(ProgressLines, every=0.0))
    code, _, err = run(capsys, *WORKLOAD, "--out", str(tmp_path))
    assert code == 0
    assert re.search(r"^herald: prefill \d+% of [\d,]+ token-layers$", err, re.MULTILINE)


def test_the_help_names_every_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    text = " ".join(out.split())
    assert "auto for the family's: 0.9, off with full attention (default: off)" in text

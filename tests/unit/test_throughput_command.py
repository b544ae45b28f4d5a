"""The throughput benchmark's own work: options, suites in processes, what fails, what is measured once."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_longctx.throughput import child, decode, options, prefill, run, suites, table
from herald.config import OffloadConfig
from herald.errors import HostPoolTooSmall

ROOT = Path(__file__).parents[2]
PREFILL = {
    "tokens": 1024,
    "offload": True,
    "seconds": 0.5,
    "tflops": 3.0,
    "peak_bytes_above_weights": None,
}


def replace_suites(monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]) -> None:
    """Run these lines of Python in the place of suites; ``path`` is the report's file."""

    def command_of(suite: str, args: argparse.Namespace, path: Path) -> list[str]:
        return [sys.executable, "-c", f"import os\npath = {str(path)!r}\n{programs[suite]}"]

    monkeypatch.setattr(run, "command_of", command_of)


@pytest.mark.parametrize(
    ("program", "why", "status"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL", -9),
        ("os.kill(os.getpid(), 11)", "ended by SIGSEGV", -11),
        ("raise SystemExit(3)", "exit status 3", 3),
        ("open(path, 'w').write('{}'); raise SystemExit(1)", "exit status 1", 1),
        ("pass", "no report", 0),
        ("open(path, 'w').write('{')", "no report", 0),
    ],
)
def test_a_suite_that_fails_is_named(
    program: str,
    why: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However it ends; the table of the others is printed."""
    works = f"open(path, 'w').write({json.dumps({'runs': [PREFILL]})!r})"
    replace_suites(monkeypatch, {"decode": program, "prefill": works})
    out = tmp_path / "out.json"
    assert run.main(["--suite", "decode,prefill", "--tiny", "--json", str(out)]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"error: suite decode failed: {why}\n"
    assert "| prefill, 1K, offloaded |" in shown.out
    found = json.loads(out.read_text())["suites"]
    assert (found["decode"]["exit_status"], found["decode"]["failed"]) == (status, why)
    assert found["prefill"]["exit_status"] == 0 and "failed" not in found["prefill"]


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "open(path, 'w').write('{}')"])
def test_no_table_without_rows(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all suites fail, and after those that print tables of their own."""
    replace_suites(monkeypatch, dict.fromkeys(("kernels", "selection"), program))
    assert run.main(["--suite", "kernels,selection", "--tiny"]) == (1 if "raise" in program else 0)
    assert capsys.readouterr().out == ""


def test_a_suite_named_twice_runs_once() -> None:
    assert options.parse(["--suite", "prefill,decode,prefill", "--tiny"]).names == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--blocks 0", "--blocks: 0 "),
        ("--blocks 99999", "use 8113 at most"),
        ("--batch -1", "--batch: -1 "),
        ("--shared nan", "--shared: nan "),
        ("--shared -0.1", "--shared: -0.1 "),
        ("--shared 1.01", "--shared: 1.01 "),
        ("--index-bits 7", "--index-bits=7 "),
        ("--lookahead-step 0", "--lookahead-step=0 "),
        ("--num-threads -1", "--num-threads=-1 "),
        ("--index-device-memory -1", "--index-device-memory: "),
        ("--index-device-memory 1GiB --index-bits 1", "--index-device-memory=1073741824 "),
        ("--index-device-memory 1GiB --no-scan-on-device", "use 0, or --scan-on-device"),
        ("--suite decode,speed", "'speed' is none; use all, or some of decode,"),
        ("--suite decode,", "'' is none"),
        ("--quick --contexts long", "leave it out beside --contexts long"),
    ],
)
def test_options_are_refused_before_a_suite_begins(
    given: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "run", lambda command: pytest.fail("a suite was begun"))
    try:
        code: Any = run.main(["--tiny", *given.split()])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["", "--suite decode --quick", "--suite selection,transfer", "--inside dense"]
)
def test_models_of_full_size_need_a_device(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(child, "run", lambda command: pytest.fail("a suite was begun"))
    assert run.main(given.split()) == 2
    assert capsys.readouterr().err == "error: no CUDA device is visible; use --tiny\n"
    assert options.parse(["--suite", "selection"]).names == ["selection"]


def test_a_suite_is_given_the_options(tmp_path: Path) -> None:
    """What the process of a suite parses is what was asked for; parts take none but their size."""
    given = "--tiny --quick --preset llada2-mini --blocks 2 --batch 3 --contexts short --lookahead-step 2"
    given += " --num-threads 1 --index-bits 4 --shared 0.5 --index-device-memory 1MiB"
    for more in ([], ["--no-scan-on-device", "--index-device-memory", "0"]):
        args = options.parse([*given.split(), *more])
        command = run.command_of("dense", args, tmp_path / "out.json")
        inside = options.parse(command[3:])
        same = vars(args).keys() - {"json", "inside", "suite", "names"}
        assert {name: getattr(inside, name) for name in same} == {name: getattr(args, name) for name in same}
        assert inside.inside == "dense" and inside.json == tmp_path / "out.json"
        part = run.command_of("kernels", args, tmp_path / "out.json")
        assert part[3:] == [f"--json={tmp_path / 'out.json'}", "--tiny"]


@pytest.mark.parametrize(("number", "code", "line"), [(signal.SIGINT, 130, "interrupted\n"), (15, 143, "")])
def test_an_interruption_ends_the_suite_too(number: int, code: int, line: str) -> None:
    """The process of a suite and those that it started are gone when the benchmark ends; one line is said."""
    # as a keyboard's, the signal of a user is for the group in the foreground
    program = """
import sys
from bench_longctx import output
from bench_longctx.throughput import child
sys.exit(output.command(child.run)(["sh", "-c", "sleep 60 & echo $$ $!; wait"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as begun:
        assert begun.stdout is not None and begun.stderr is not None
        pids = [int(pid) for pid in begun.stdout.readline().split()]
        assert len(pids) == 2
        os.killpg(begun.pid, number)
        assert begun.wait(20) == code
        assert begun.stderr.read() == line
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_case_is_measured_once() -> None:
    both, few = ("--contexts both", "--contexts short", "--contexts long", "--quick"), (0, 1, 2, 5)
    for given, batch in itertools.product(both, few):
        args = options.parse(["--tiny", "--batch", str(batch), *given.split()])
        runs = suites.runs_of(args, batch or 3, 1 if batch == 1 else 2)
        assert len(set(runs)) == len(runs)
        assert {r.prefix for r in runs} == {
            "--contexts both": {1024, 2048},
            "--contexts long": {2048},
        }.get(given, {1024})
    cases = [(r.batch, r.steps, r.retrieval) for r in runs_of("--tiny --quick --batch 1", 1)]
    assert cases == [(1, 20, decode.FULL), (1, 8, decode.FULL)]
    cases = [(r.batch, r.steps, r.retrieval) for r in runs_of("--tiny --contexts short", 2)]
    kinds = (decode.FULL, decode.LANES_ONLY, decode.BARE)
    assert sorted(cases) == sorted([(2, 8, decode.FULL), *((b, 20, kind) for b in (2, 1) for kind in kinds)])


def runs_of(given: str, most: int) -> list[decode.Run]:
    return suites.runs_of(options.parse(given.split()), most, 2)


@pytest.mark.parametrize("fits", [3, 2, 1])
@pytest.mark.parametrize("batch", ["0", "1"])
def test_a_batch_that_no_host_memory_holds(fits: int, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four fifths are tried; where they do not fit either, the error says so. Engines given up are closed."""
    made: list[FakeEngine] = []

    def make_engine(model: object, offload: OffloadConfig, most: int, shared: float) -> FakeEngine:
        made.append(FakeEngine(most))
        return made[-1]

    def measure(engine: FakeEngine, run: decode.Run) -> dict[str, Any]:
        if engine.most > (0 if batch == "1" and fits == 1 else fits):
            raise HostPoolTooSmall(f"no room for {run.batch}", "use less")
        return {"batch": run.batch}

    monkeypatch.setattr(suites, "make_engine", make_engine)
    monkeypatch.setattr(decode, "measure", measure)
    args = options.parse(["--tiny", "--batch", batch])
    if fits == 1:
        with pytest.raises(HostPoolTooSmall, match=f"no room for {2 if batch == '0' else 1}; use less"):
            suites.begin_decode(args, None)  # type: ignore[arg-type]
        assert all(engine.closed for engine in made)
    else:
        most = min(fits, int(batch) or 3)
        engine, runs, first = suites.begin_decode(args, None)  # type: ignore[arg-type]
        assert engine is made[-1] and not made[-1].closed and all(given.closed for given in made[:-1])
        assert first == {"batch": most} and runs[0].batch == most


class FakeEngine:
    def __init__(self, most: int) -> None:
        self.most, self.closed = most, False

    def close(self) -> None:
        self.closed = True


def test_quick_leaves_the_long_context_out_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "measure", lambda model, tokens, *rest: {"tokens": tokens})
    monkeypatch.setattr(suites, "load", lambda args: None)
    for given, contexts in ((["--quick"], {1024}), ([], {1024, 2048})):
        runs = suites.run_prefill(options.parse(["--tiny", *given]))["runs"]
        assert {each["tokens"] for each in runs} == contexts


def test_goals_are_those_of_full_size() -> None:
    found = {"prefill": {"runs": [PREFILL]}}
    assert table.render(found).endswith("| prefill, 1K, offloaded | 395 TFLOP/s | 0.50 s, 3 TFLOP/s |")
    assert table.render(found, goals=False).endswith("| prefill, 1K, offloaded |  | 0.50 s, 3 TFLOP/s |")
    assert table.render({}) == ""

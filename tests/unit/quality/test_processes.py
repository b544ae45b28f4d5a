"""Jobs side by side, and what ends them: a failure, a damaged model, Ctrl-C."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_longctx.quality import cells, run
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.quality.report import Report
from bench_longctx.quality.report_file import ReportLost
from herald.errors import WeightsError
from tests.unit.quality.conftest import SMALL, TINY, fake_cell


@pytest.mark.parametrize("width", [2, 3, 15])
def test_pieces_are_the_same_cells(width: int):
    tasks = [str(number) for number in range(8)]
    todo = [(Job("dense", 1.0, length), tasks) for length in (8192, 16384, 32768)]
    pieces = run.spread(todo, width)
    cut = [(job, task) for job, part in pieces for task in part]
    assert sorted(map(str, cut)) == sorted(str((job, task)) for job, whole in todo for task in whole)
    assert len(pieces) == min(2 * width, 24)
    sizes = [job.length * len(part) for job, part in pieces]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= max(32768, 2 * sum(sizes) / width)


def test_a_failed_process_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Jobs in threads that stand in for processes: one fails, one dies silently, one finishes."""

    class Process:
        exitcode = -9

        def __init__(self, target: Any, args: tuple, daemon: bool) -> None:
            self.thread = threading.Thread(target=target, args=args, daemon=daemon)
            self.start, self.join, self.is_alive = self.thread.start, self.thread.join, self.thread.is_alive

    context = SimpleNamespace(Queue=queue.Queue, Process=Process)
    monkeypatch.setattr(run.multiprocessing, "get_context", lambda kind: context)

    def work(number: int, job: Job, settings: Any, tasks: list[str], threads: int, arrivals: Any) -> None:
        if job.method == "centre":
            arrivals.put((number, None, "centre: out of memory"))
        elif job.method == "dense":
            arrivals.put((number, job.key("keys"), fake_cell(job, "keys", [1.0])))
            arrivals.put((number, None, None))

    monkeypatch.setattr(run, "_work", work)
    said: list[str] = []
    monkeypatch.setattr(run, "_say", said.append)
    jobs = [Job("dense", 1.0, 2048), Job("centre", 0.1, 2048), Job("page_bounds", 0.1, 2048)]
    report = Report(run.settings_of(run.parse([])), tmp_path / "out.json")
    failed = run.run_side_by_side([(job, ["keys"]) for job in jobs], report, 1, 2)
    assert failed == 2
    assert "centre: out of memory" in said and "a process ended with exit code -9" in said
    assert list(report.cells) == [jobs[0].key("keys")]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, ReportLost])
def test_no_process_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: type[BaseException]):
    """Neither after Ctrl-C nor where a finished cell cannot be written. One has ended before."""
    said: list[tuple[int, str]] = []
    made: list[Any] = []

    class Process:
        exitcode = 0

        def __init__(self, target: Any, args: tuple, daemon: bool) -> None:
            self.number, self.alive = len(made), False
            made.append(self)

        def start(self) -> None:
            self.alive = True
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            said.append((self.number, f"blocked: {signal.SIGINT in blocked}"))

        def is_alive(self) -> bool:
            return self.alive

        def terminate(self) -> None:
            said.append((self.number, "terminate"))
            self.alive = self.number == 1  # which then has to be killed

        def kill(self) -> None:
            said.append((self.number, "kill"))

        def join(self, timeout: float | None = None) -> None:
            self.alive = self.alive and timeout is not None

    class Arrivals:
        def get(self, timeout: float) -> Any:
            if len(made) == 2:
                return 0, None, None
            raise ends("x")

    context = SimpleNamespace(Queue=Arrivals, Process=Process)
    monkeypatch.setattr(run.multiprocessing, "get_context", lambda kind: context)
    jobs = [(Job("dense", 1.0, length), ["keys"]) for length in (1024, 2048, 4096, 8192)]
    with pytest.raises(ends), Report(run.settings_of(run.parse([])), None) as report:
        run.run_side_by_side(jobs, report, 1, 2)
    assert [text for _, text in said[:3]] == ["blocked: True"] * 3
    assert said[3:] == [(1, "terminate"), (2, "terminate"), (1, "kill")]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            WeightsError("model.safetensors is cut off", "load it again"),
            1,
            "centre at 2048: model.safetensors",
        ),
        (RuntimeError("CUDA out of memory"), 1, "RuntimeError: CUDA out of memory"),
    ],
)
def test_what_is_finished_is_printed_whatever_ends_the_rest(
    monkeypatch: pytest.MonkeyPatch,
    ran: list[str],
    capsys: pytest.CaptureFixture,
    error: BaseException,
    code: int,
    said: str,
):
    run_job = cells.run_job

    def fails(job: Job, settings: Settings, tasks: list[str], threads: int, say: Any) -> Iterator[Any]:
        if job.method == "centre":
            raise error
        yield from run_job(job, settings, tasks, threads, say)

    monkeypatch.setattr(cells, "run_job", fails)
    given = [*SMALL, "--count", "10", "--methods", "centre", "dense", "window_sinks", "--tasks", "keys"]
    assert run.main(given) == code
    out, err = capsys.readouterr()
    assert said in err and "| dense | 100% | 100.0 |" in out and "centre" not in out
    # the others go on, unless it is the person who ends it
    assert ("window_sinks" in out) == (code == 1)


def test_damaged_weights_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    given = [*SMALL, "--count", "1", "--methods", "dense", "--tasks", "keys", "--level", "bytes"]
    assert run.main([*given, "--model", str(model)]) == 1
    err = capsys.readouterr().err
    assert "dense at 2048: " in err and "safetensors" in err and "Traceback" not in err
    (model / "config.json").write_text("{")
    assert run.main([*given, "--model", str(model)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_real_processes_side_by_side(tmp_path: Path):
    path = tmp_path / "out.json"
    given = [*SMALL, "--count", "1", "--methods", "dense", "window_sinks", "--tasks", "needle", "--jobs", "2"]
    assert run.run(run.parse([*given, "--json", str(path)])) == 0
    assert len(json.loads(path.read_text())["cells"]) == 2


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(tmp_path: Path):
    given = [*SMALL, "--count", "50", "--methods", "dense", "centre", "--tasks", "pairs", "--jobs", "2"]
    run_of = [sys.executable, "-m", "bench_longctx.quality.run", *given, "--json", str(tmp_path / "out.json")]
    root = Path(__file__).parents[3]
    group = subprocess.Popen(
        run_of,
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}"},
    )
    deadline = time.monotonic() + 90
    while len(children(group.pid)) < 3:  # both, and the one that keeps count of shared resources
        assert time.monotonic() < deadline and group.poll() is None
        time.sleep(0.2)
    time.sleep(1)
    os.killpg(group.pid, signal.SIGINT)  # as a terminal does
    _, err = group.communicate(timeout=60)
    assert group.returncode == 130 and err.strip() == "interrupted"
    while left := alive(group.pid):
        assert time.monotonic() < deadline + 60, left
        time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []


def alive(group: int) -> list[str]:
    """Processes of a group that are not only waiting for someone to read their exit code."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            found.append(path.parent.name)
    return found


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

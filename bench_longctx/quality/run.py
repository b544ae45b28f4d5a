"""The quality suite: methods x budgets x lengths x tasks, on the same documents, as one table.

    python -m bench_longctx.quality.run --json out.json
    python -m bench_longctx.quality.run --methods dense lookahead_1 centre --budgets 0.05 --tasks keys values
    python -m bench_longctx.quality.run --model /data/sdar-8b --tasks ruler --lengths 16384 --jobs 1 --json
    out.json
    python -m bench_longctx.quality.run --repeat bench_longctx/results/quality_methods.json --jobs 15

`dense` runs once a length, every other method at every budget; all see the same documents. Finished cells are
kept in the JSON file, and a run with the same settings goes on with them. With ``--jobs N`` engines run in N
processes side by side, which is for scores: times are then not a machine's to itself. ``--repeat`` takes
settings and cells of a report that is there.

Exit codes: 0; 1 where a job failed, whose cells are missing, or the disk is full; 2 for what cannot be run;
130 where interrupted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_longctx import output
from bench_longctx.quality import cases, cells, checks, methods
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.quality.report import Report, check_digests, load, repeated, table, tasks_of
from bench_longctx.quality.report_file import ReportLost
from herald.errors import HeraldError, UsageError
from herald.hardware import usable_cores

LENGTHS = (8192, 16384, 32768)
BUDGETS = (0.02, 0.05, 0.10)
Task = tuple[Job, list[str]]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    width = max(map(len, methods.NAMES)) + 2
    described = "\n".join(f"  {method.name:{width}}{method.about}" for method in methods.ALL)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"methods:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="tiny")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--methods", nargs="+", default=list(methods.NAMES), help="names below; all by default")
    add("--budgets", type=float, nargs="+", default=list(BUDGETS), help="resident rows / prefix rows")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="bytes or tokens of a prompt (--level)")
    add("--level", choices=("auto", "bytes", "tokens"), default="auto", help="auto: bytes for tiny")
    add("--tasks", nargs="+", help="names, ruler, longbench, or FILE.jsonl; all generated ones by default")
    add("--data", type=Path, help="folder of the user's RULER or LongBench files")
    add("--plain", action="store_true", help="no chat template")
    add("--count", type=int, default=100, help="documents of each task")
    add("--seed", type=int, default=7)
    add("--batch", type=int, default=16, help="requests that decode together")
    add("--max-tokens", type=int, default=256, help="of an answer to a task in bytes")
    add("--threshold", type=float, default=0.9, help="confidence above which a position is committed")
    add("--denoising-steps", type=int, default=0, help="a fixed number of steps a block instead")
    add("--index-bits", type=int, nargs="+", choices=(16, 8, 4, 1), help="8 by default")
    add("--operator", nargs="+", choices=methods.OPERATORS, help="max by default")
    add("--lookahead-step", type=int, nargs="+", help="of the method lookahead_k; 3 by default")
    add("--min-resident-rows", type=int, default=1, help="floor of the resident set")
    add("--threads", type=int, default=0, help="CPU threads of a process, 0 for its share of the cores")
    add("--jobs", type=int, default=1, help="engines side by side, in processes of their own")
    add("--repeat", type=Path, help="run that report's cells anew; only --threads, --jobs, --json beside it")
    add("--json", type=Path, help="keep the cells there, with versions and machine")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    level = cells.level_of(args.level, args.model)
    default = cases.BYTE_TASKS if level == "bytes" else cases.TOKEN_TASKS
    return Settings(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        level=level,
        tasks=tuple(args.tasks or default),
        data=None if args.data is None else str(args.data),
        chat=not args.plain,
        count=args.count,
        seed=args.seed,
        batch=args.batch,
        max_tokens=args.max_tokens,
        threshold=args.threshold,
        denoising_steps=args.denoising_steps,
        min_resident_rows=args.min_resident_rows,
    )


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """All jobs, short lengths first, `dense` first within a length. A switch that makes no difference to a
    method makes no further job."""
    ordered = sorted(dict.fromkeys(args.methods), key=lambda name: name != "dense")
    jobs = []
    for length in args.lengths:
        for name in ordered:
            if name == "dense":
                jobs.append(Job(name, 1.0, length))
                continue
            method = methods.get(name)
            bits = (args.index_bits or [8]) if method.uses_index else [16 if method.exact_keys else 8]
            operators = (args.operator or ["max"]) if method.uses_operator else ["max"]
            steps = (args.lookahead_step or [3]) if name == "lookahead_k" else [0]
            jobs += [
                Job(name, budget, length, bit, operator, step)
                for budget in args.budgets
                for bit in bits
                for operator in operators
                for step in steps
            ]
    return list(dict.fromkeys(jobs))


def asked_of(args: argparse.Namespace) -> tuple[Settings, list[Task]]:
    """Settings and all jobs with their tasks, of the options or of the report to repeat."""
    if args.repeat is None:
        settings, jobs = settings_of(args), jobs_of(args)
        given = (args.index_bits, args.operator, args.lookahead_step)
        checks.check_unused(settings, jobs, *(value is not None for value in given))
        asked: list[Task] = [(job, cells.task_names(settings)) for job in jobs]
        checks.check(settings, asked)
        return settings, asked
    usual = vars(parse([]))
    for name in usual.keys() - {"repeat", "threads", "jobs", "json"}:
        if getattr(args, name) != usual[name]:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is not valid with --repeat", f"leave --{option} or --repeat out")
    if args.json is not None and args.json.resolve() == args.repeat.resolve():
        raise UsageError(f"--json {args.json} holds the cells to repeat already", "name another --json file")
    settings, found = repeated(args.repeat)
    asked = list(found.items())
    checks.check(settings, asked)
    held = {task: digest for task, digest in digests_of(settings, asked).items() if digest}
    check_digests(args.repeat, load(args.repeat)[1], held, "put the files back that it was made of")
    return settings, asked


def digests_of(settings: Settings, asked: Sequence[Task]) -> dict[str, str]:
    """{task: digest of its files}."""
    return {task: cells.digest_of(task, settings) for _, tasks in asked for task in tasks}


def unfinished(asked: Sequence[Task], report: Report) -> list[Task]:
    """Jobs with the tasks whose cells the report does not hold yet."""
    left = [(job, [task for task in tasks if job.key(task) not in report.cells]) for job, tasks in asked]
    return [(job, missing) for job, missing in left if missing]


def spread(todo: Sequence[Task], width: int) -> list[Task]:
    """The same cells for ``width`` processes: two pieces or more for each where tasks allow it, the long ones
    first. A job that is left whole may run for as long as all others together."""

    def rows(piece: Task) -> int:
        return piece[0].length * len(piece[1])

    pieces = list(todo)
    while len(pieces) < 2 * width and any(len(tasks) > 1 for _, tasks in pieces):
        largest = max((piece for piece in pieces if len(piece[1]) > 1), key=rows)
        pieces.remove(largest)
        job, tasks = largest
        pieces += [(job, tasks[: len(tasks) // 2]), (job, tasks[len(tasks) // 2 :])]
    return sorted(pieces, key=rows, reverse=True)


def run_here(todo: Sequence[Task], report: Report, threads: int) -> int:
    """Run jobs one after the other in this process.

    Returns:
        Jobs that failed. Each is reported; the others go on.
    """
    failed = 0
    for job, tasks in todo:
        try:
            for key, cell in cells.run_job(job, report.settings, tasks, threads, _say):
                report.add(key, cell)
        except ReportLost:
            raise
        except Exception as error:
            _say(_what_failed(job, error))
            failed += 1
    return failed


def run_side_by_side(todo: Sequence[Task], report: Report, threads: int, width: int) -> int:
    """Run pieces of jobs in ``width`` processes, one a piece. None is left, whatever ends this.

    Returns:
        Pieces that failed. Each is reported; the others go on.
    """
    context = multiprocessing.get_context("spawn")
    arrivals: Any = context.Queue()
    waiting, failed = list(todo), 0
    running: dict[int, Any] = {}
    number = 0
    try:
        while waiting or running:
            while waiting and len(running) < width:
                job, tasks = waiting.pop(0)
                process = context.Process(
                    target=_work, args=(number, job, report.settings, tasks, threads, arrivals), daemon=True
                )
                running[number] = process
                with _interrupts_are_ours():
                    process.start()
                number += 1
            failed += _take(arrivals, running, report)
    finally:
        _end(running.values())
    return failed


def _take(arrivals: Any, running: dict[int, Any], report: Report) -> int:
    """Take what comes first of the processes, or see which are gone; the pieces that failed."""
    try:
        who, key, cell = arrivals.get(timeout=1.0)
    except queue.Empty:
        # a process that was killed says nothing
        gone = [who for who, process in running.items() if not process.is_alive()]
        if not gone or not arrivals.empty():
            return 0
        for who in gone:
            _say(f"a process ended with exit code {running.pop(who).exitcode}")
        return len(gone)
    if key is not None:
        report.add(key, cell)
        _say(f"{key}: {cell['score']:.1%} in {cell['seconds']:.0f} s")
        return 0
    running.pop(who).join()
    if cell is None:
        return 0
    _say(cell)
    return 1


@contextmanager
def _interrupts_are_ours() -> Iterator[None]:
    """Processes started within have Ctrl-C blocked: the terminal sends it to all, and this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: Iterable[Any]) -> None:
    """End processes that run still."""
    started = [process for process in processes if process.is_alive()]
    for process in started:
        process.terminate()
    for process in started:
        process.join(10)
        if process.is_alive():
            process.kill()


def _work(number: int, job: Job, settings: Settings, tasks: list[str], threads: int, arrivals: Any) -> None:
    """A process's job: its cells go into ``arrivals``, last (number, None, what went wrong or None)."""
    wrong = None
    try:
        cells.limit_torch(threads)
        for key, cell in cells.run_job(job, settings, tasks, threads, lambda _: None):
            arrivals.put((number, key, cell))
    except BaseException as error:
        wrong = _what_failed(job, error)
    arrivals.put((number, None, wrong))


def _what_failed(job: Job, error: BaseException) -> str:
    if isinstance(error, HeraldError):
        return f"{job.method} at {job.length}: {error}"
    return f"{job.method} at {job.length}:\n{''.join(traceback.format_exception(error))}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Run what the arguments say and print the table of what is finished; the exit code.

    Raises:
        HeraldError: it cannot be run.
        ReportLost: the report cannot be written any more.
    """
    for name, value in (("--count", args.count), ("--jobs", args.jobs), ("--batch", args.batch)):
        if value < 1:
            raise UsageError(f"{name} {value} is not valid", "use 1 or more")
    if args.threads < 0:
        raise UsageError(f"--threads {args.threads} is not valid", "use 0 for a share of the cores, or more")
    settings, asked = asked_of(args)
    with Report(settings, args.json, args.jobs, digests_of(settings, asked)) as report:
        todo = unfinished(asked, report)
        threads = cells.threads_for(args.jobs, args.threads, usable_cores())
        try:
            if args.jobs == 1:
                failed = run_here(todo, report, threads)
            else:
                failed = run_side_by_side(spread(todo, args.jobs), report, threads, args.jobs)
        finally:
            _print_table(report, {job.key(task) for job, tasks in asked for task in tasks})
    return output.FAILED if failed else 0


def _print_table(report: Report, keys: set[str]) -> None:
    finished = {key: cell for key, cell in report.cells.items() if key in keys}
    if finished:
        print(table(finished, tasks_of(asdict(report.settings), finished)))


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())

"""Runs the tests marked ``gpu`` and writes what came out, with the machine, as JSON.

    python -m bench_longctx.gpu_tests --json bench_longctx/results/gpu_tests.json [--jobs 8] [pytest paths]

They are spread over ``--jobs`` processes; those that time copies run alone afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench_longctx import machine, output

PATHS = ["tests/kernels", "tests/unit", "tests/engine", "tests/gpu"]


def run_pytest(paths: list[str], marks: str, jobs: int) -> dict[str, Any]:
    """One pytest run over the tests below ``paths`` that have ``marks``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        spread = ["-n", str(jobs)] if jobs > 1 else []
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", *spread, *paths]
        began = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [
        {"test": case.get("name"), "reason": node.get("message")}
        for case in suite.iter("testcase")
        if (node := case.find("skipped")) is not None
    ]
    figures = {
        f"{case.get('name')}.{item.get('name')}": item.get("value")
        for case in suite.iter("testcase")
        for item in case.iter("property")
    }
    return {
        "paths": paths,
        "marks": marks,
        "exit_code": code,
        "tests": int(suite.get("tests", 0)),
        "failed": failed,
        "skipped": skipped,
        "figures": figures,
        "seconds": round(time.perf_counter() - began, 1),
    }


@output.command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    output.check_file(args.json)
    paths = args.paths or PATHS
    runs: list[dict[str, Any]] = []
    for marks, jobs in (("gpu and not timed", args.jobs), ("gpu and timed", 1)):
        runs.append(run_pytest(paths, marks, jobs))
        # after each, so that one cut short leaves the other
        output.write_report(args.json, {"machine": machine.describe(), "runs": runs})
    failed, skipped = (sum(len(r[what]) for r in runs) for what in ("failed", "skipped"))
    passed = sum(r["tests"] for r in runs) - failed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(any(r["exit_code"] not in (0, 5) for r in runs))


if __name__ == "__main__":
    sys.exit(main())

"""Every figure of the performance table, on one GPU: block times, rates, ratios to a dense engine.

    python -m bench_longctx.throughput --suite all --json out.json
    python -m bench_longctx.throughput --suite decode,dense --json out.json
    python -m bench_longctx.throughput --suite decode --tiny        # a small model, also on a CPU
    python -m bench_longctx.throughput --suite decode,dense --preset llada2-mini --batch 40

Weights and KV are random, nothing is downloaded. Each suite runs in a process of its own; one that fails is
named on stderr, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_longctx import output

# torch is imported within `main`, where an interruption ends with a line as everywhere


def command_of(suite: str, args: argparse.Namespace, path: Path) -> list[str]:
    """The command that runs one suite and writes what it found to ``path``."""
    from bench_longctx.throughput.options import PARTS

    sizes = ["--tiny"] * args.tiny
    if suite in PARTS:
        return [sys.executable, "-m", PARTS[suite], f"--json={path}", *sizes]
    return [
        *(sys.executable, "-m", "bench_longctx.throughput", f"--inside={suite}", f"--json={path}"),
        *(f"--preset={args.preset}", f"--blocks={args.blocks}", f"--batch={args.batch}"),
        *(f"--contexts={args.contexts}", f"--lookahead-step={args.lookahead_step}"),
        *(f"--num-threads={args.num_threads}", f"--index-bits={args.index_bits}", f"--shared={args.shared}"),
        "--scan-on-device" if args.scan_on_device else "--no-scan-on-device",
        f"--index-device-memory={args.index_device_memory}",
        *(sizes + ["--quick"] * args.quick),
    ]


def in_own_process(suite: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one suite in a child process: what it found, its exit status, and in ``failed`` how it failed."""
    from bench_longctx.throughput import child

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        began = time.perf_counter()
        status = child.run(command_of(suite, args, path))
        result: dict[str, Any] = {"exit_status": status, "seconds": time.perf_counter() - began}
        try:
            result |= json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            result["failed"] = "no report"
    if status:
        result["failed"] = child.how(status)
    return result


@output.command
def main(arguments: list[str] | None = None) -> int:
    """Run the suites and print the table; 0 when none of them failed."""
    from bench_longctx import machine
    from bench_longctx.throughput import options, table

    args = options.parse(arguments)
    if args.inside:
        from bench_longctx.throughput.suites import SUITES

        output.write_report(args.json, SUITES[args.inside](args))
        return 0
    asked = {name: value for name, value in vars(args).items() if name not in ("inside", "names")}
    report: dict[str, Any] = {"machine": machine.describe(), "options": asked | {"json": str(args.json)}}
    suites = report["suites"] = {}
    for name in args.names:
        suites[name] = in_own_process(name, args)
        output.write_report(args.json, report)
    if text := table.render(suites, goals=not args.tiny):
        print(text, flush=True)
    failed = {name: suite["failed"] for name, suite in suites.items() if "failed" in suite}
    for name, why in failed.items():
        print(f"error: suite {name} failed: {why}", file=sys.stderr)
    return output.FAILED if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

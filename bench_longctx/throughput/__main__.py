"""Every figure of the performance table, on one GPU: block times, rates, ratios to a dense engine.

    python -m bench_longctx.throughput --suite all --json out.json
    python -m bench_longctx.throughput --suite decode,dense --json out.json
    python -m bench_longctx.throughput --suite decode --tiny        # a small model, also on a CPU
    python -m bench_longctx.throughput --suite decode,dense --preset llada2-mini --batch 40

Weights and KV are random, nothing is downloaded. Each suite runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench_longctx import machine
from bench_longctx.throughput import decode, prefill, table
from bench_longctx.throughput.synthetic import begin_without_prefill, make_engine, random_model
from herald.cli.options import size
from herald.config import OffloadConfig
from herald.errors import HostPoolTooSmall
from herald.models import PRESETS

BLOCK, BUDGET = 32, 0.05
MAX_POSITIONS = 1 << 18
# What is measured are blocks of a prefix that is final.
BLOCK_PRESETS = sorted(
    name for name, config in PRESETS.items() if not config.full_attention and config.noise is None
)
GIB = 1 << 30
# Device memory that dense and offloading engine may each use.
CAP_BYTES = 80 * GIB
# Share of a selection that the next block keeps, as measured on real keys at this budget.
SHARED = 0.68


def sizes(tiny: bool) -> tuple[int, int, tuple[int, ...], int]:
    """(short context, long context, batches at the short one, batch at the long one)."""
    return (1024, 2048, (3, 2, 1), 2) if tiny else (32_000, 128_000, (20, 8, 1), 4)


def load(args: argparse.Namespace) -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return random_model(args.preset, BLOCK, MAX_POSITIONS, device, args.tiny)


def huge_page_bytes() -> int:
    """Bytes of this process that lie on huge pages; scans of 4 KiB pages are slower."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def run_decode(args: argparse.Namespace) -> dict[str, Any]:
    """The offloading engine: three batches at the short context, two at the long one."""
    model = load(args)
    begin_without_prefill()
    offload = OffloadConfig(
        kv_budget=BUDGET,
        lookahead_step=args.lookahead_step,
        index_bits=args.index_bits,
        num_threads=args.num_threads,
        scan_on_device=args.scan_on_device,
        index_device_bytes=args.index_device_memory,
    )
    short, long, batches, long_batch = sizes(args.tiny)
    if args.batch:
        batches = (args.batch, *(b for b in batches if b < args.batch))
        long_batch = min(long_batch, max(1, args.batch * short // long))
    began = time.perf_counter()
    for most in (batches[0], batches[0] * 4 // 5):
        engine = make_engine(model, offload, most, args.shared)
        begin = decode.Run(short, most, 20, args.blocks)
        if args.contexts == "long":
            begin = decode.Run(long, long_batch, 20, args.blocks)
        try:
            first = decode.measure(engine, begin)
            break
        except HostPoolTooSmall as error:
            print(f"batch {most} does not fit this host: {error}", file=sys.stderr)
            engine.close()
    ready = time.perf_counter() - began
    found = [first]
    plan = [decode.Run(short, most, 8, args.blocks)]
    for batch in (most, *batches[1:]):
        kinds = (decode.FULL, decode.LANES_ONLY, decode.BARE)
        plan += [decode.Run(short, batch, 20, args.blocks, kind) for kind in kinds][batch == most :]
    at_length = [decode.Run(long, 1, 20, args.blocks), decode.Run(long, long_batch, 8, args.blocks)]
    if args.contexts == "both":
        plan += [decode.Run(long, long_batch, 20, args.blocks), *at_length]
    elif args.contexts == "long":
        plan = at_length
    if args.quick:
        plan = [decode.Run(short, most, 8, args.blocks), decode.Run(short, 1, 20, args.blocks)]
    for run in plan:
        found.append(decode.measure(engine, run))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    busy = {}
    if model.device.type == "cuda" and args.contexts != "long":
        busy = {str(b): decode.busy_share(engine, decode.Run(short, b, 20)) for b in (1, most)}
    store = engine.memory.store
    assert store is not None
    facts = {
        "setup_seconds": ready,
        "transfer": store.transfer.name,
        "transfer_why": store.transfer_why,
        "selection": store.selector.isa,
        "scan_on_device": store.selector.device_scan is not None,
        "scan_on_device_why": store.selector.device_reason,
        "layers_of_index_on_device": 0
        if store.selector.device_scan is None
        else store.selector.device_scan.layers_held,
        "pool_bytes": store.pool.num_bytes,
        "index_bytes": store.index.num_bytes,
        "weight_bytes": model.weight_bytes,
        "huge_page_bytes": huge_page_bytes(),
    }
    engine.close()
    return {"facts": facts, "runs": found, "busy": busy}


def run_dense(args: argparse.Namespace) -> dict[str, Any]:
    """The same engine with all KV on the device: the largest batch under the cap, and one request."""
    model = load(args)
    begin_without_prefill()
    config = model.config
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    found = []
    for prefix in sizes(args.tiny)[: 1 if args.quick else 2]:
        room = CAP_BYTES - model.weight_bytes - 2 * GIB  # logits, graphs, workspace
        positions = prefix + BLOCK * (decode.WARM_BLOCKS + args.blocks + 2)
        most = 2 if args.tiny else int(room // (token_bytes * positions))
        for batch in (most, 1):
            engine = make_engine(model, OffloadConfig(enabled=False), batch, 0.0)
            found.append(decode.measure(engine, decode.Run(prefix, batch, 20, args.blocks)))
            if batch == most:
                found.append(decode.measure(engine, decode.Run(prefix, batch, 8, args.blocks)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            engine.close()
    return {"runs": found}


def run_prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts of both contexts, with and without the copies to the host."""
    model = load(args)
    short, long = sizes(args.tiny)[:2]
    chunk = 256 if args.tiny else 4096
    found = []
    for tokens, runs in ((short, 3), (long, 1)):
        found.append(prefill.measure(model, tokens, OffloadConfig(kv_budget=BUDGET), chunk, runs))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        found.append(prefill.measure(model, tokens, OffloadConfig(enabled=False), chunk, runs))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"runs": found}


SUITES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "decode": run_decode,
    "dense": run_dense,
    "prefill": run_prefill,
}
# Benchmarks of single parts, as modules of their own.
PARTS = {
    "kernels": "bench_longctx.kernels.bench_kernels",
    "transfer": "bench_longctx.transfer.bench_interference",
    "selection": "bench_longctx.selection.bench_select",
}


def in_own_process(suite: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one suite in a child process; an empty dict with its exit status where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        if suite in PARTS:
            command = [sys.executable, "-m", PARTS[suite], "--json", str(path)]
        else:
            command = [
                sys.executable,
                "-m",
                "bench_longctx.throughput",
                "--inside",
                suite,
                "--json",
                str(path),
            ]
            command += [f"--preset={args.preset}", f"--blocks={args.blocks}"]
            command += [f"--contexts={args.contexts}", f"--lookahead-step={args.lookahead_step}"]
            command += [f"--num-threads={args.num_threads}"]
            command.append("--scan-on-device" if args.scan_on_device else "--no-scan-on-device")
            command += [f"--index-device-memory={args.index_device_memory}"]
            command += [f"--index-bits={args.index_bits}", f"--shared={args.shared}", f"--batch={args.batch}"]
        command += ["--tiny"] * args.tiny + ["--quick"] * args.quick
        began = time.perf_counter()
        status = subprocess.run(command, check=False).returncode
        found = json.loads(path.read_text()) if path.exists() else {}
        return {"exit_status": status, "seconds": time.perf_counter() - began, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", default="all", help=f"all, or some of {','.join((*SUITES, *PARTS))}")
    parser.add_argument(
        "--preset", choices=BLOCK_PRESETS, default="sdar-8b", help="shape of the model (%(default)s)"
    )
    parser.add_argument("--blocks", type=int, default=6, help="blocks that are measured (%(default)s)")
    parser.add_argument("--batch", type=int, default=0, help="largest batch at the short context (20)")
    parser.add_argument(
        "--contexts",
        choices=("both", "short", "long"),
        default="both",
        help="of decoding (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the largest batch and batch 1, at the short context"
    )
    parser.add_argument("--lookahead-step", type=int, default=1)
    parser.add_argument("--index-bits", type=int, default=8)
    parser.add_argument("--shared", type=float, default=SHARED, help="share of a set that the next one keeps")
    parser.add_argument("--num-threads", type=int, default=0, help="threads of selection, 0 for the default")
    parser.add_argument(
        "--scan-on-device",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the device score a share of the index",
    )
    parser.add_argument(
        "--index-device-memory", type=size, default=0, help="device memory for the key index, such as 24GiB"
    )
    parser.add_argument("--tiny", action="store_true", help="a two-layer model and short contexts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        args.json.write_text(json.dumps(SUITES[args.inside](args), indent=1))
        return 0
    if args.quick and args.contexts == "long":
        parser.error("--quick measures the short context: leave it out beside --contexts long")
    names = [*SUITES, *PARTS] if args.suite == "all" else args.suite.split(",")
    unknown = [name for name in names if name not in {**SUITES, **PARTS}]
    if unknown:
        parser.error(f"--suite {unknown[0]}: use all, or some of {','.join((*SUITES, *PARTS))}")
    report: dict[str, Any] = {"machine": machine.describe(), "options": vars(args) | {"json": str(args.json)}}
    report["suites"] = {}
    for name in names:
        report["suites"][name] = in_own_process(name, args)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
    print(table.render(report["suites"]))
    return max(suite["exit_status"] for suite in report["suites"].values())


if __name__ == "__main__":
    raise SystemExit(main())

"""Options of the throughput benchmark, all of them checked before a model is built."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from bench_longctx import options as kinds
from bench_longctx import output
from bench_longctx.throughput.decode import SPARE_BLOCKS, WARM_BLOCKS
from herald.cli import fields
from herald.cli.options import size, whole
from herald.config import OffloadConfig
from herald.errors import InvalidOption
from herald.models import PRESETS

BLOCK, BUDGET = 32, 0.05
MAX_POSITIONS = 1 << 18
# Share of a selection that the next block keeps, as measured on real keys at this budget.
SHARED = 0.68
# What is measured are blocks of a prefix that is final.
BLOCK_PRESETS = sorted(
    name for name, config in PRESETS.items() if not config.full_attention and config.noise is None
)
SUITES = ("decode", "dense", "prefill")
# Benchmarks of single parts, as modules of their own.
PARTS = {
    "kernels": "bench_longctx.kernels.bench_kernels",
    "transfer": "bench_longctx.transfer.bench_interference",
    "selection": "bench_longctx.selection.bench_select",
}
ALL = (*SUITES, *PARTS)
# What is measured on the CPU whatever else there is.
WITHOUT_DEVICE = {"selection"}


def sizes(tiny: bool) -> tuple[int, int, tuple[int, ...], int]:
    """(short context, long context, batches at the short one, batch at the long one)."""
    return (1024, 2048, (3, 2, 1), 2) if tiny else (32_000, 128_000, (20, 8, 1), 4)


def offload_of(args: argparse.Namespace) -> OffloadConfig:
    """The configuration that decoding is measured with.

    Raises:
        InvalidOption: an option is out of range; it is named as on the command line.
    """
    try:
        return dataclasses.replace(fields.offload_config(args), kv_budget=BUDGET)
    except InvalidOption as error:
        raise InvalidOption(error.problem, fields.in_options(error.remedy, args), error.field) from error


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; ``args.names`` are the suites to run, each once.

    Raises:
        UsageError: options that do not go together, or not with this machine.
    """
    args = _parser().parse_args(arguments)
    args.names = list(ALL) if args.suite == "all" else list(dict.fromkeys(args.suite.split(",")))
    for name in args.names:
        if name not in ALL:
            raise InvalidOption(
                f"--suite {args.suite}: {name!r} is none", f"use all, or some of {','.join(ALL)}"
            )
    if args.quick and args.contexts == "long":
        raise InvalidOption("--quick measures the short context", "leave it out beside --contexts long")
    room = MAX_POSITIONS - sizes(args.tiny)[1]
    most = room // BLOCK - WARM_BLOCKS - SPARE_BLOCKS - 2
    if args.blocks > most:
        raise InvalidOption(
            f"--blocks {args.blocks} do not fit {MAX_POSITIONS} positions", f"use {most} at most"
        )
    offload_of(args)
    if not WITHOUT_DEVICE.issuperset([args.inside] if args.inside else args.names):
        kinds.need_cuda(args.tiny)
    output.check_file(args.json)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench_longctx.throughput",
        description="Block times, rates, and ratios to a dense engine, on one GPU.",
    )
    add = parser.add_argument
    add("--suite", default="all", help=f"all, or some of {','.join(ALL)}")
    add("--preset", choices=BLOCK_PRESETS, default="sdar-8b", help="shape of the model (%(default)s)")
    add("--blocks", type=kinds.at_least(1), default=6, help="blocks that are measured (%(default)s)")
    add("--batch", type=kinds.at_least(0), default=0, help="largest batch at the short context, 0 for 20")
    add("--contexts", choices=("both", "short", "long"), default="both", help="of decoding (%(default)s)")
    add(
        "--quick",
        action="store_true",
        help="only the short context, and of batches of decoding only the largest and 1",
    )
    add("--lookahead-step", type=whole, default=1, help="step that looks ahead (%(default)s)")
    add("--index-bits", type=whole, default=8, help="of the key index: 16, 8, 4 or 1 (%(default)s)")
    add("--shared", type=kinds.share, default=SHARED, help="share of a set that the next one keeps")
    add("--num-threads", type=whole, default=0, help="threads of selection, 0 for the default")
    add(
        "--scan-on-device",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the device score a share of the index",
    )
    add("--index-device-memory", type=size, default=0, help="device memory for the key index, such as 24GiB")
    add("--tiny", action="store_true", help="a two-layer model and short contexts, also on a CPU")
    add("--json", type=Path, help="write all figures to this file, after every suite")
    add("--inside", choices=SUITES, help=argparse.SUPPRESS)
    return parser

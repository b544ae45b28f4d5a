"""``herald doctor``: what this machine offers, and what would make it faster."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from herald.cli import fields, options
from herald.config import check
from herald.errors import UsageError

if TYPE_CHECKING:
    from herald.doctor import Finding


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``herald doctor``."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--model", help="also say which context fits this model: folder, hub id, tiny or a preset"
    )
    parser.add_argument(
        "--bandwidth",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure copy bandwidth, about a second (default: yes)",
    )
    _add_plan_options(
        parser.add_argument_group(
            "plan",
            "With --model and one of --context, --gpu-memory and --host-memory: say from the model's "
            "configuration alone what fits (weights, resident set, host pool, largest batch), and nothing "
            "of this machine.",
        )
    )


def _add_plan_options(group: Any) -> None:
    memory = "memory to plan for, such as 24GiB (default: what is free here)"
    group.add_argument("--context", type=options.whole, metavar="N", help="positions of a request")
    group.add_argument("--gpu-memory", type=options.size, metavar="SIZE", help=f"GPU {memory}")
    group.add_argument("--host-memory", dest="host", type=options.size, metavar="SIZE", help=f"host {memory}")
    kinds = {
        "--kv-budget": options.number,
        "--index-bits": options.whole,
        "--index-device-memory": options.size,
    }
    for name, kind in kinds.items():
        group.add_argument(name, type=kind, default=argparse.SUPPRESS, help="as for herald generate")
    options.add_override_options(group)


def run(args: argparse.Namespace) -> int:
    """Examine, print, and return the exit code."""
    with contextlib.redirect_stdout(sys.stderr):
        findings = _findings(args)
    _clear_line()
    if args.json:
        print(json.dumps(json_report(findings), indent=2))
    else:
        print_report(findings)
    return 0


def _findings(args: argparse.Namespace) -> list[Finding]:
    from herald.doctor import examine
    from herald.doctor.context import probe_plan

    offload, overrides = fields.offload_config(args), fields.overrides(args)
    if args.context is None and args.gpu_memory is None and args.host is None:
        for name, value in overrides.items():
            if args.model is None and value not in ("", None) and (name, value) != ("block_length", 0):
                raise UsageError(f"--{name.replace('_', '-')} is a model's", "add --model, or leave it out")
        report = None if args.json else _report_on_terminal
        return examine(args.model, args.bandwidth, report, offload, **overrides)
    if args.model is None:
        raise UsageError("a plan needs a model", "add --model with a folder, a hub id or a preset")
    check(args.context is None or args.context >= 1, "--context", args.context, "use 1 or more, as 131072")
    return [probe_plan(args.model, args.context or 0, args.gpu_memory, args.host, offload, **overrides)]


def json_report(findings: Sequence[Finding]) -> dict[str, object]:
    """The object that ``--json`` prints: the version, and value and advice of each finding by its name."""
    from herald import __version__

    return {
        "version": __version__,
        "findings": {each.name: {**each.value, "advice": each.advice} for each in findings},
    }


def print_report(findings: Sequence[Finding]) -> None:
    """A line or more a finding, advice behind an arrow."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for each in findings:
        text = Text("\n".join(each.text))
        if each.advice:
            text.append(f"\n-> {each.advice}", style="yellow")
        table.add_row(each.name.replace("_", " "), text)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "Each -> says what would help." if any(each.advice for each in findings) else "All is well."
    )


def _report_on_terminal(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[Kexamining {name.replace('_', ' ')} ...", end="", file=sys.stderr, flush=True)


def _clear_line() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)

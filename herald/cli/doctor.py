"""``herald doctor``: what this machine offers, and what would make it faster."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from herald.doctor import Finding


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``herald doctor``."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--model", help="also say which context fits this model: folder, hub id or tiny")
    parser.add_argument(
        "--bandwidth",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure copy bandwidth, about a second (default: yes)",
    )


def run(args: argparse.Namespace) -> int:
    """Examine, print, and return the exit code."""
    from herald.doctor import examine

    with contextlib.redirect_stdout(sys.stderr):
        findings = examine(args.model, args.bandwidth, None if args.json else _report_on_terminal)
    _clear_line()
    if args.json:
        print(json.dumps(json_report(findings), indent=2))
    else:
        print_report(findings)
    return 0


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

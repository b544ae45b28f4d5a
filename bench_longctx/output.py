"""How a benchmark ends: its report's file is tried before anything is measured, its errors are one line."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from herald.cli.stdout import drop_output
from herald.errors import HeraldError, UsageError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
P = ParamSpec("P")


def check_file(path: Path | None, option: str = "--json") -> None:
    """Refuse a report's file that could not be written. What is there stays as it is; nothing is left there.

    Args:
        path: None where no report is wanted.
        option: of the command line that names it.

    Raises:
        UsageError: its folder is missing, it is no regular file, or the system does not let it be written.
    """
    problem = None if path is None else _problem(path)
    if problem is not None:
        raise UsageError(f"{option} {path} cannot be written: {problem}", "name another file", option)


def _problem(path: Path) -> str | None:
    """Why a file could not be written, None where it could."""
    try:
        # the file that a link leads to, or would make
        target = Path(os.path.realpath(path))
        there = target.exists()
        if not there and not target.parent.is_dir():
            return (
                f"{target.parent} is no folder"
                if target.parent.exists()
                else f"there is no folder {target.parent}"
            )
        if target.is_dir():
            return "it is a folder"
        if there and not target.is_file():  # a device takes what is written and keeps nothing, a pipe waits
            return "it is not a regular file"
        with open(target, "ab"):
            pass
        if not there:
            target.unlink()
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return None


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON, where one is wanted."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Wrap a benchmark's ``main``: what its process exits with, and one line in the place of a traceback.

    A `HeraldError` becomes ``error: problem; remedy`` on stderr and 2, an interruption ``interrupted`` and
    130; a file that could not be read or written (a full disk, say) is a line and 1. Other exceptions are
    faults of the benchmark and pass.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = main(*args, **kwargs) or 0
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return say("interrupted", INTERRUPTED)
        except HeraldError as error:
            return say(f"error: {' '.join(str(error).split())}", REFUSED)
        except BrokenPipeError:
            drop_output()  # the reader left
            return FAILED
        except OSError as error:
            drop_output()
            return say(f"error: {error}", FAILED)

    return wrapped


def say(line: str, code: int) -> int:
    """Print a line on stderr; ``code``, for a ``return``."""
    print(line, file=sys.stderr, flush=True)
    return code

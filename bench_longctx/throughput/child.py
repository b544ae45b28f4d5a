"""Suites in processes of their own, which end with the one that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType

# How long a process may take to end when it is asked to.
GRACE_SECONDS = 5.0


def run(command: list[str]) -> int:
    """Run a command and return its exit status, that of a signal as a negative number.

    It has a session of its own, so that an interruption from the keyboard is for the caller alone; whatever
    ends the caller meanwhile (that, SIGTERM or SIGHUP) ends the command and its processes first.
    """
    with _leaving_on(signal.SIGTERM, signal.SIGHUP):
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return child.wait()
        finally:
            if child.returncode is None:
                _end(child)


def how(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and those of its session."""
    try:
        _signal(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    finally:
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def _leaving_on(*numbers: signal.Signals) -> Iterator[None]:
    """Turn signals that would end this process at once into `SystemExit`; those ignored stay ignored."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

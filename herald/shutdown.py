"""Ends background threads before the interpreter goes.

A daemon thread that comes back from native code while the interpreter is finalised is made to exit where it
stands. Where that is within a C++ frame, as in our extension and in torch, the process aborts ("terminate
called without an active exception"). So whoever has such a thread is registered here, and ended first.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol

# All threads together; one that has not come back by then is left to its fate.
EXIT_SECONDS = 20.0

# What runs, in the order in which it ends: steps submit jobs, and jobs wait for copies.
Kind = Literal["steps", "jobs", "copies"]


class Stoppable(Protocol):
    """Who has a daemon thread."""

    def stop(self) -> None:
        """Begin nothing more that need not be, without waiting. The thread may be gone already."""

    def join(self, seconds: float, /) -> None:
        """Wait for the thread, for so long at most."""


_live: dict[Kind, weakref.WeakSet[Stoppable]] = {
    "steps": weakref.WeakSet(),
    "jobs": weakref.WeakSet(),
    "copies": weakref.WeakSet(),
}
_lock = threading.Lock()


def end_at_exit(kind: Kind, who: Stoppable) -> None:
    """Have ``who`` end before the interpreter does, if it still lives then."""
    with _lock:
        _live[kind].add(who)


class PatientThread(threading.Thread):
    """A daemon thread that cannot be told to stop: the interpreter's end waits for it, within `EXIT_SECONDS`.

    Args:
        target: what it runs.
        name: of the thread.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        end_at_exit("steps", self)

    def stop(self) -> None:
        """Nothing: see `Stoppable`."""


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for of_kind in _live.values():
        with _lock:
            live = list(of_kind)
        for each in live:
            with suppress(Exception):  # nobody is left to tell
                each.stop()
        for each in live:
            with suppress(RuntimeError):  # a thread that was never started
                each.join(max(deadline - time.monotonic(), 0.0))


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    for of_kind in _live.values():
        of_kind.clear()


# A forked child has none of the threads.
os.register_at_fork(after_in_child=_forget)

"""One background thread that runs jobs in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

from herald.errors import UsageError
from herald.shutdown import end_at_exit

_Job = tuple[Future, Callable[..., Any], tuple[Any, ...]]


class BackgroundWorker:
    """Runs submitted jobs one at a time, first in, first out, on a daemon thread.

    What a job returns or raises reaches its future; an error ends neither the thread nor later jobs. At the
    interpreter's end the job that runs ends, and those behind it are cancelled.
    """

    def __init__(self, name: str = "herald-background") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        end_at_exit("jobs", self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Queue ``function(*args)``.

        Raises:
            UsageError: the worker is closed, or belongs to the process that this one was forked from.
        """
        future: Future = Future()
        with self._lock:
            if self._closed:
                raise UsageError("the background worker is closed", "make a new one")
            if not self._thread.is_alive():
                raise UsageError(
                    "the background worker's thread is gone: a forked process has none of them",
                    "make the model in the process that uses it",
                )
            self._jobs.put((future, function, args))
        return future

    def close(self) -> None:
        """Finish the jobs that are queued and end the thread. Closing twice is allowed."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self) -> None:
        """As `close`, without waiting: jobs that have not begun fail with `CancelledError`."""
        left: list[_Job | None] = []
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    left.append(self._jobs.get_nowait())
            self._jobs.put(None)
        for future, *_ in filter(None, left):
            if future.set_running_or_notify_cancel():
                future.set_exception(CancelledError())

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            # A job's arrays must not live until the next one arrives.
            del job, future, function, args

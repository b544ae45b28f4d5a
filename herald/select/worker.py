"""One background thread that runs jobs in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from herald.errors import UsageError

_Job = tuple[Future, Callable[..., Any], tuple[Any, ...]]


class BackgroundWorker:
    """Runs submitted jobs one at a time, first in, first out, on a daemon thread.

    What a job returns or raises reaches its future; an error ends neither the thread nor later jobs.
    """

    def __init__(self, name: str = "herald-background") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Queue ``function(*args)``.

        Raises:
            UsageError: the worker is closed.
        """
        future: Future = Future()
        with self._lock:
            if self._closed:
                raise UsageError("the background worker is closed", "make a new one")
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

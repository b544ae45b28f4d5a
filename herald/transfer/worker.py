"""One daemon thread that runs jobs in the order they came."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from herald.shutdown import end_at_exit


class FifoWorker:
    """Runs submitted jobs one after the other.

    A job handles its own errors; one that escapes is a bug of the job and ends up in
    `threading.excepthook`, while the worker goes on.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        end_at_exit("copies", self)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the jobs submitted so far and end the thread."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """As `close`, without waiting."""
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                threading.excepthook(
                    threading.ExceptHookArgs(
                        (type(error), error, error.__traceback__, threading.current_thread())
                    )
                )
            # Else the job's tensors would live until the next job arrives.
            del job

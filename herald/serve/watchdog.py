"""Reports a step that does not end: what the engine was at, and where every thread is."""

from __future__ import annotations

import faulthandler
import json
import logging
import tempfile
import threading

from herald.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks after an engine from a thread of its own.

    Args:
        seconds: a step that takes longer is reported, once.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, engine: AsyncEngine) -> None:
        """Begin to look."""
        self._thread = threading.Thread(
            target=self._watch, args=(engine,), name="herald-watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, engine: AsyncEngine) -> None:
        reported = -1
        while not self._ended.wait(min(self.seconds / 4, 1.0)):
            steps = engine.stats().steps
            if engine.health().seconds_in_step > self.seconds and steps != reported:
                reported = steps
                logger.error("no step ended in %.0f s\n%s", self.seconds, dump(engine))


def dump(engine: AsyncEngine) -> str:
    """State of the engine and stacks of all threads; no text or token of a prompt."""
    state = json.dumps(engine.describe(), indent=2)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return f"{state}\n{file.read()}"

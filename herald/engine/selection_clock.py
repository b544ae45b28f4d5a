"""Measures what selections take, for a look-ahead that runs as late as it can."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from herald.engine.lookahead import LateLookahead
from herald.engine.retriever import Selection


@dataclass(eq=False)
class SelectionTimes:
    """Moments of one selection on the clock of `time.perf_counter`, None before they come.

    Attributes:
        asked: the step that made its queries ended.
        free: the selection before it was chosen, 0 if there was none.
        chosen: its rows are known.
        arrived: they are on the device.
        void: it was given up before it began, or failed: it says nothing of what a selection takes.
    """

    asked: float | None = None
    free: float = 0.0
    chosen: float | None = None
    arrived: float | None = None
    void: bool = False


class SelectionClock:
    """Tells a `LateLookahead` how long steps and selections take.

    Args:
        lookahead: is told.
    """

    def __init__(self, lookahead: LateLookahead) -> None:
        self.lookahead = lookahead
        self._queue: list[SelectionTimes] = []
        self._free = 0.0
        self._lock = threading.Lock()

    @property
    def queued(self) -> int:
        """Selections that were submitted and are not chosen yet."""
        self._queue = [times for times in self._queue if times.chosen is None]
        return len(self._queue)

    @property
    def running(self) -> float:
        """Seconds for which the first of them has been under way."""
        if not self.queued or self._queue[0].asked is None:
            return 0.0
        return max(0.0, time.perf_counter() - max(self._queue[0].asked, self._free))

    def submitted(self, selection: Selection) -> SelectionTimes:
        """Follow a selection that was just submitted."""
        times = SelectionTimes()
        self._queue.append(times)

        def chosen(positions: Future[np.ndarray]) -> None:
            with self._lock:  # a selecting thread, of which there may be several
                now = time.perf_counter()
                times.void = positions.exception() is not None
                if not times.void:
                    times.free, self._free = self._free, now
                times.chosen = now

        selection.positions.add_done_callback(chosen)
        return times

    def asked(self, times: SelectionTimes, at: float) -> None:
        """The step that made its queries ended."""
        times.asked = at
        self._tell(times)

    def arrived(self, times: SelectionTimes, at: float | None) -> None:
        """Its rows arrived, or it was given up; None where no row had to travel."""
        times.arrived = times.chosen if at is None else at
        self._tell(times)

    def _tell(self, times: SelectionTimes) -> None:
        if times.void or times.asked is None or times.chosen is None or times.arrived is None:
            return
        began = max(times.asked, times.free)
        seconds = (max(times.chosen - began, 0.0), max(times.arrived - times.chosen, 0.0))
        self.lookahead.selection_took(*seconds, waited=times.free > times.asked)

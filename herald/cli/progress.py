"""Progress bars of prefill and decoding on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from herald.outputs import Progress

_LABELS = {"prefill": ("prefill", "token-layers"), "decode": ("decode", "tokens")}


class ProgressBars:
    """One bar a phase, summed over the requests seen. Calling it with a `Progress` moves the bars.

    Args:
        enabled: False draws nothing.
        num_requests: requests to come; those that have not begun count as the mean of those that have.
        phases: phases that get a bar; a streamed answer leaves ``"decode"`` out, it is its own progress.
    """

    def __init__(
        self, enabled: bool, num_requests: int = 1, phases: tuple[str, ...] = ("prefill", "decode")
    ) -> None:
        self._num_requests = num_requests
        self._phases = phases if enabled else ()
        self._seen: dict[str, dict[str, Progress]] = {phase: {} for phase in _LABELS}
        self._bars: dict[str, Any] = {}

    def __call__(self, event: Progress) -> None:
        if event.phase != "prefill" and event.phase not in self._phases:
            self.close()
        if event.phase not in self._phases:
            return
        seen = self._seen[event.phase]
        seen[event.request_id] = event
        total = sum(each.total for each in seen.values())
        total = total * max(self._num_requests, len(seen)) // len(seen)
        self._show(event.phase, sum(each.done for each in seen.values()), total)

    def _show(self, phase: str, done: int, total: int) -> None:
        bar = self._bar(phase)
        bar.total, bar.n = total, done
        bar.refresh()

    def _bar(self, phase: str) -> Any:
        if phase not in self._bars:
            from tqdm import tqdm

            label, unit = _LABELS[phase]
            self._bars[phase] = tqdm(
                total=0, desc=f"{label:7}", unit=f" {unit}", unit_scale=True, leave=False, file=sys.stderr
            )
        return self._bars[phase]

    def close(self) -> None:
        """Remove the bars from the terminal."""
        # The lower bar first, so that the cursor ends where the upper one stood.
        for phase in reversed(list(self._bars)):
            self._bars.pop(phase).close()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ProgressLines(ProgressBars):
    """The same as lines, for a log or a pipe: one when the last is ``every`` seconds old."""

    def __init__(self, num_requests: int = 1, every: float = 10.0) -> None:
        super().__init__(True, num_requests)
        self._every = every
        self._last = time.monotonic()

    def _show(self, phase: str, done: int, total: int) -> None:
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            label, unit = _LABELS[phase]
            print(f"herald: {label} {done / total:.0%} of {total:,} {unit}", file=sys.stderr, flush=True)

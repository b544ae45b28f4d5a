"""When a late look-ahead runs: as late in a block as selection and transfer can still be hidden.

A late draft selects better, and rows that are not there when their block begins are waited for. So the moment
follows from what is measured (how long a step takes, a selection, a selection behind another one, the way of
its rows) and from how many steps the block still has. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

# Blocks, steps and selections that measurements go back.
BLOCKS, STEPS, SELECTIONS = 16, 64, 32


class Pace:
    """How fast the blocks of a request lose their masks, where a threshold decides."""

    def __init__(self) -> None:
        self._blocks: deque[list[int]] = deque(maxlen=BLOCKS)
        self._masks: list[int] = []

    def saw(self, before: int, after: int) -> None:
        """A step found ``before`` masked positions in the block and left ``after``."""
        self._masks.append(before)
        if after == 0:
            self._blocks.append(self._masks)
            self._masks = []

    def steps_left(self, masks: int) -> int | None:
        """Steps that a block with ``masks`` masked positions still takes, None before a block is known.

        A low estimate: the lower quartile of what earlier blocks took from that many masks on; at least 1.
        """
        if not self._blocks:
            return None
        return max(1, int(quantile([sum(m <= masks for m in block) for block in self._blocks], 0.25)))


class LateLookahead:
    """Decides which look-aheads run in the step that is planned.

    Selections queue for the cores. Of the requests that could look ahead, those whose blocks end first go
    first, and one goes only when putting the rest off by a step would bring somebody's rows too late, and
    when the queue would otherwise run empty: until then a later draft costs nothing. In the last step of its
    block a request looks ahead in any case.

    Args:
        margin: times the measured time that has to be left.
        share: quantile of the measured times of selections that counts as their time.
    """

    def __init__(self, margin: float = 1.25, share: float = 0.9) -> None:
        self.margin = margin
        self.share = share
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._alone: deque[float] = deque(maxlen=SELECTIONS)
        self._after: deque[float] = deque(maxlen=SELECTIONS)
        self._bring: deque[float] = deque(maxlen=SELECTIONS)

    def step_took(self, seconds: float) -> None:
        """Note how long a step took."""
        self._steps.append(seconds)

    def selection_took(self, seconds: float, bring: float, waited: bool = False) -> None:
        """Note a selection.

        Args:
            seconds: until its rows were chosen, from its queries on, or from the choice of the selection
                before it if it ``waited`` for that one.
            bring: seconds from its choice to the arrival of its rows.
        """
        (self._after if waited else self._alone).append(seconds)
        self._bring.append(bring)

    @property
    def measured(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self._bring) and self.step_seconds > 0

    @property
    def step_seconds(self) -> float:
        """Median of the measured steps, 0 without one."""
        return quantile(self._steps, 0.5) if self._steps else 0.0

    def due(
        self, to_come: Sequence[int], queued: int, running: float = 0.0, under_way: int = 0
    ) -> list[bool]:
        """Which of the requests that could look ahead do so in the step that is planned.

        Args:
            to_come: for each, the steps of its block after that one.
            queued: selections that are asked for and not chosen yet.
            running: seconds for which the first of them has been under way.
            under_way: steps that were launched and not read yet.
        """
        step = self.step_seconds
        first, next_one = self._hidden_seconds()
        backlog = queued * next_one
        # what is sure to be left of the queue when the step that is planned ends
        usual = quantile(self._after or self._alone, 0.5)
        work = max(0.0, queued * usual - min(running, usual) - (under_way + 1) * step)
        order = sorted(range(len(to_come)), key=to_come.__getitem__)
        looks = [False] * len(to_come)
        for place, index in enumerate(order):
            # Seconds from the end of the planned step; a step later, the queue is a step shorter.
            waits = max(backlog - step, 0.0) + first
            in_time = all(
                step + self.margin * (waits + ahead * next_one) <= to_come[i] * step
                for ahead, i in enumerate(order[place:])
            )
            if in_time or (work >= step and to_come[index] > 0):
                break
            looks[index] = True
            backlog += next_one
            work += usual
        return looks

    def steps_needed(self, selections: int) -> int:
        """With more steps of its block to come than that, none of so many look-aheads is due."""
        first, next_one = self._hidden_seconds()
        seconds = self.margin * (first + max(selections - 1, 0) * next_one)
        return math.floor(1 + seconds / self.step_seconds)

    def _hidden_seconds(self) -> tuple[float, float]:
        """(until a selection that waits for no other one has its rows, what each before it adds)."""
        next_one = quantile(self._after or self._alone, self.share)
        first = quantile(self._alone or self._after, self.share) + quantile(self._bring, self.share)
        return first, next_one


def quantile(values: Iterable[float], share: float) -> float:
    """The value that ``share`` of ``values`` (at least one) do not exceed; of 0.5 the lower median."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

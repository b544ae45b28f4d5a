"""How the authors of the families with full attention decode a canvas, block by block.

A rule says what each step takes (`Take`); it sees how far a block is, never logits. Sources: LLaDA
(arXiv 2502.09992, generate.py), Dream (arXiv 2508.15487, generation_utils.py), Fast-dLLM (arXiv 2505.22618,
section 3 and its code for both families).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from herald.config import check
from herald.decode.quota import quota
from herald.decode.take import Take

# Where Dream's time schedule ends; its released generation_config.json has the same.
TIME_END = 1e-3


@dataclass
class BlockState:
    """How far a block is.

    Attributes:
        positions: of the block.
        left: masked ones.
        step: index of the next step.
        carry: positions that the step before looked at and did not take.
    """

    positions: int
    left: int
    step: int = 0
    carry: int = 0

    @classmethod
    def begin(cls, positions: int) -> BlockState:
        return cls(positions, positions)

    def took(self, take: Take, count: int) -> None:
        """A step took ``count`` positions."""
        self.carry = max(min(take.look, self.left) - count, 0)
        self.left -= count
        self.step += 1


class Rule(ABC):
    """What each step of a block takes. Every rule takes all of them in the end."""

    name: ClassVar[str]

    @abstractmethod
    def take(self, state: BlockState) -> Take:
        """Of the next step, with ``state.left`` masks before it, at least one."""

    def next(self, state: BlockState) -> Take:
        """Of the next step that takes anything: forwards of the others would change nothing."""
        take = self.take(state)
        while not take.look:
            state.step += 1
            take = self.take(state)
        return take


@dataclass(frozen=True)
class FixedQuota(Rule):
    """LLaDA: the same number of positions in every step, one more in the first of them.

    Args:
        steps: of a block; 0 for one a position.
    """

    steps: int
    name: ClassVar[str] = "fixed"

    def take(self, state: BlockState) -> Take:
        quotas = quota(state.positions, self.steps)
        count = min(quotas[min(state.step, len(quotas) - 1)], state.left)
        return Take(count, count)


@dataclass(frozen=True)
class Threshold(Rule):
    """Fast-dLLM: all positions whose confidence reaches a threshold, the best one at least."""

    threshold: float
    name: ClassVar[str] = "threshold"

    def take(self, state: BlockState) -> Take:
        return Take(state.left, 1, self.threshold)


@dataclass(frozen=True)
class Factor(Rule):
    """Fast-dLLM: the n best positions, n the largest with (n + 1) (1 - confidence of the n-th) <= factor.

    At least the best one. Where only the least confident mask of a block fails, the published loop takes it
    all the same; here it waits for the next step, as its equation says.
    """

    factor: float
    name: ClassVar[str] = "factor"

    def take(self, state: BlockState) -> Take:
        floors = tuple(1.0 - self.factor / (place + 2) for place in range(state.left))
        return Take(state.left, 1, floors)


@dataclass(frozen=True)
class TimeSchedule(Rule):
    """Dream: time falls evenly from 1 to `TIME_END`; a step takes as many masks as the share it passes.

    The share is rounded down, so a step may take none. The last one takes what is left.

    Args:
        steps: of a block; 0 for one a position.
    """

    steps: int
    name: ClassVar[str] = "schedule"

    def take(self, state: BlockState) -> Take:
        steps = self.steps or state.positions
        count = state.left
        if state.step < steps - 1:
            count = int(torch.tensor(float(state.left)) * _shares(steps)[state.step])
        return Take(count, count)


@cache
def _shares(steps: int) -> torch.Tensor:
    """1 - t[s+1] / t[s], float32 [steps], as the published code rounds it."""
    times = torch.linspace(1, TIME_END, steps + 1)
    return 1 - times[1:] / times[:-1]


@dataclass(frozen=True)
class CarriedThreshold(Rule):
    """Dream over a whole canvas: of a step's even share, those that reach the threshold, one at least.

    What a step looked at and did not take, the next one looks at too. After the last step only that is
    looked at, until nothing is left.

    Args:
        steps: that share the positions; 0 for one a position.
    """

    threshold: float
    steps: int
    name: ClassVar[str] = "carried_threshold"

    def take(self, state: BlockState) -> Take:
        quotas = quota(state.positions, self.steps)
        share = quotas[state.step] if state.step < len(quotas) else 0
        return Take(min(share + state.carry, state.left), 1, self.threshold)


@dataclass(frozen=True)
class FirstAlone(Rule):
    """Fast-dLLM for Dream: the first step takes the block's first position alone, then a rule goes on.

    Its row stands before the block and is seen by the full forward only. With a `TimeSchedule` the first
    step is one of its steps.
    """

    rule: Rule
    name: ClassVar[str] = "first_alone"

    def __post_init__(self) -> None:
        if isinstance(self.rule, TimeSchedule):
            steps = self.rule.steps
            check(steps != 1, "denoising_steps", steps, "use 2 or more: the first takes one position alone")

    def take(self, state: BlockState) -> Take:
        return Take(1, 1, first_only=True) if state.step == 0 else self.rule.take(state)

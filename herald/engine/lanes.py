"""Lanes: the one shape of a forward.

A lane is B consecutive positions of one request. It attends to the request's resident set, to itself
(bidirectionally) and to its parent lane. See `docs/architecture.md` for what this one rule covers.

A step is described by integers alone, so that a CUDA graph recorded for a `StepShape` serves every step
of that shape: `StepPlan` collects them on the host, `StepInputs` names their places on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class StepShape:
    """What a step's work on the device depends on.

    Attributes:
        lanes: N.
        logits: R, lanes whose blocks are denoised.
        finals: F, lanes whose KV is final and is kept.
        captures: C, lanes whose queries are kept for a selection.
        max_length: at least every lane's resident length, a power of two.
        draws: some request samples: logits are kept, and the commit runs afterwards.
    """

    lanes: int
    logits: int
    finals: int
    captures: int
    max_length: int
    draws: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the fields of `StepInputs`."""
        return (*[self.lanes] * 5, *[self.logits] * 4, self.finals, self.captures)


class StepInputs(NamedTuple):
    """The integers of a step, each int64: [N] x 5, [R] x 4, [F], [C]."""

    source: torch.Tensor  # row of the block table that holds the lane's tokens
    position: torch.Tensor  # of its first token
    row_start: torch.Tensor  # first arena row of its request
    length: torch.Tensor  # rows of the resident set it attends to
    parent: torch.Tensor  # a lane of this step, or -1
    logit_lane: torch.Tensor
    slot: torch.Tensor  # of the block table
    opening: torch.Tensor  # 1 where the slot's block is finished and its next block begins
    quota: torch.Tensor  # positions to commit at least
    final_lane: torch.Tensor
    capture_lane: torch.Tensor

    @classmethod
    def views(cls, vector: torch.Tensor, shape: StepShape) -> StepInputs:
        """The fields as they lie in one int64 vector of ``sum(shape.sizes)`` elements."""
        return cls(*vector.split(shape.sizes))


@dataclass
class StepPlan:
    """The integers of a step while requests add their lanes."""

    source: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    row_start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    logit_lane: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    opening: list[int] = field(default_factory=list)
    quota: list[int] = field(default_factory=list)
    final_lane: list[int] = field(default_factory=list)
    capture_lane: list[int] = field(default_factory=list)

    def add_lane(self, source: int, position: int, row_start: int, length: int, parent: int = -1) -> int:
        """Append a lane; returns its index."""
        self.source.append(source)
        self.position.append(position)
        self.row_start.append(row_start)
        self.length.append(length)
        self.parent.append(parent)
        return len(self.source) - 1

    def add_block(self, lane: int, slot: int, opening: bool, quota: int) -> None:
        """Have the block of ``slot`` denoised by ``lane``."""
        self.logit_lane.append(lane)
        self.slot.append(slot)
        self.opening.append(int(opening))
        self.quota.append(quota)

    def shape(self, draws: bool, batch: int) -> StepShape:
        """The shape of this step.

        Args:
            batch: requests that decode, in this step or beside it: counts are rounded up with it in mind, so
                that few shapes occur. 0 for exact counts.
        """
        counts = [len(self.source), len(self.logit_lane), len(self.final_lane), len(self.capture_lane)]
        lanes, logits, finals, captures = counts
        if batch:
            least = 4 if batch > 3 else 1
            logits = round_lanes(max(logits, batch)) if logits else 0
            lanes = round_lanes(max(lanes, logits))
            finals, captures = (max(least, round_kept(count)) if count else 0 for count in (finals, captures))
        return StepShape(lanes, logits, finals, captures, next_power_of_2(max(self.length)), draws)

    def pack(self, shape: StepShape, masks_row: int, spare_slot: int) -> np.ndarray:
        """All integers, int64, in the order of `StepInputs`; padding touches nothing but the spare slot."""
        pads = (masks_row, 0, 0, 0, -1, 0, spare_slot, 0, 0, 0, 0)
        values: list[int] = []
        for name, size, pad in zip(StepInputs._fields, shape.sizes, pads, strict=True):
            given: list[int] = getattr(self, name)
            values += given
            values += [pad] * (size - len(given))
        return np.array(values, dtype=np.int64)


def next_power_of_2(count: int) -> int:
    """``count`` rounded up to a power of two; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count else 0


def round_kept(count: int) -> int:
    """``count`` rounded up to 0, 1, 4, 16, ...: a lane more to keep costs little, another recording much."""
    return 1 << -(-(count - 1).bit_length() // 2) * 2 if count else 0


def round_lanes(count: int) -> int:
    """``count`` rounded up: fine steps where a lane is a large part of the work, coarse ones above."""
    for limit, step in ((4, 1), (8, 2), (32, 4), (64, 8)):
        if count <= limit:
            return -(-count // step) * step
    return -(-count // 16) * 16

"""Lanes: the one shape of a forward.

A lane is B consecutive positions of one request. It attends to the request's resident set, to itself
(bidirectionally, or causally where finished blocks are encoded so) and to its parent lane. See
`docs/architecture.md` for what this one rule covers.

A step is described by integers alone, so that a CUDA graph recorded for a `StepShape` serves every step
of that shape: `StepPlan` collects them on the host, `StepInputs` names their places on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class StepShape(NamedTuple):
    """What a step's work on the device depends on.

    Attributes:
        lanes: N.
        logits: R, lanes whose blocks are denoised.
        finals: F, lanes whose KV is final and is kept.
        captures: C, lanes whose queries are kept for a selection.
        max_length: at least every lane's resident length, a power of two.
        draws: some request samples: logits are kept, and the commit runs afterwards.
        edits: some request's committed tokens may change.
    """

    lanes: int
    logits: int
    finals: int
    captures: int
    max_length: int
    draws: bool
    edits: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the fields of `StepInputs` but for ``free_rows``."""
        return (*[self.lanes] * 7, *[self.logits] * 4, self.finals, self.captures)

    @property
    def quotas_at(self) -> int:
        """Where in a step's integers the quotas begin."""
        return 7 * self.lanes + 3 * self.logits


class StepInputs(NamedTuple):
    """The integers of a step, each int64: [N] x 7, [R] x 4, [F], [C], [F * layers * kv_heads * B]."""

    source: torch.Tensor  # row of the block table that holds the lane's tokens
    position: torch.Tensor  # of its first token
    row_start: torch.Tensor  # first arena row of its request
    length: torch.Tensor  # rows of the resident set it attends to
    parent: torch.Tensor  # a lane of this step, or -1
    window_start: torch.Tensor  # first row of its request among the rows of layers with a window
    final: torch.Tensor  # 1 where its tokens are taken as final: a finished block, or a draft of one
    logit_lane: torch.Tensor
    slot: torch.Tensor  # of the block table
    opening: torch.Tensor  # 1 where the slot's block is finished and its next block begins
    quota: torch.Tensor  # positions to commit at least
    final_lane: torch.Tensor
    capture_lane: torch.Tensor
    free_rows: torch.Tensor  # flat arena rows that the final lanes' rows are written to, -1 for none

    @classmethod
    def views(cls, vector: torch.Tensor, shape: StepShape) -> StepInputs:
        """The fields as they lie in one int64 vector; ``free_rows`` is what is left of it."""
        sizes = shape.sizes
        return cls(*vector.split((*sizes, vector.numel() - sum(sizes))))


class StepPlan:
    """The integers of a step while requests add their lanes.

    Attributes:
        longest: rows of the longest resident set.
        final_lane, capture_lane: see `StepInputs`.
    """

    def __init__(self) -> None:
        # [lanes, 7] and [blocks, 4], each flat: the first and the next fields of `StepInputs`.
        self._lanes: list[int] = []
        self._blocks: list[int] = []
        self.longest = 0
        self.final_lane: list[int] = []
        self.capture_lane: list[int] = []

    @property
    def num_lanes(self) -> int:
        return len(self._lanes) // 7

    @property
    def num_blocks(self) -> int:
        return len(self._blocks) // 4

    def add_lane(
        self,
        source: int,
        position: int,
        row_start: int,
        length: int,
        parent: int = -1,
        window_start: int = 0,
        final: bool = False,
    ) -> int:
        """Append a lane, see `StepInputs`; returns its index."""
        lane = len(self._lanes) // 7
        self._lanes += (source, position, row_start, length, parent, window_start, int(final))
        if length > self.longest:
            self.longest = length
        return lane

    def add_block(self, lane: int, slot: int, opening: bool, quota: int) -> None:
        """Have the block of ``slot`` denoised by ``lane``."""
        self._blocks += (lane, slot, int(opening), quota)

    def shape(self, draws: bool, batch: int, edits: bool = False) -> StepShape:
        """The shape of this step.

        Args:
            batch: requests that decode, in this step or beside it: counts are rounded up with it in mind, so
                that few shapes occur. 0 for exact counts.
        """
        counts = [self.num_lanes, self.num_blocks, len(self.final_lane), len(self.capture_lane)]
        lanes, logits, finals, captures = counts
        if batch:
            least = 4 if batch > 3 else 1
            logits = round_lanes(max(logits, batch)) if logits else 0
            lanes = round_lanes(max(lanes, logits))
            finals, captures = (max(least, round_kept(count)) if count else 0 for count in (finals, captures))
        return StepShape(lanes, logits, finals, captures, next_power_of_2(self.longest), draws, edits)

    def pack(self, shape: StepShape, masks_row: int, spare_slot: int) -> np.ndarray:
        """All integers, int64, in the order of `StepInputs` but without ``free_rows``.

        Padding touches nothing but the spare slot.
        """
        lanes = self._lanes + [masks_row, 0, 0, 0, -1, 0, 0] * (shape.lanes - self.num_lanes)
        blocks = self._blocks + [0, spare_slot, 0, 0] * (shape.logits - self.num_blocks)
        finals, captures = self.final_lane, self.capture_lane
        values = [
            *(number for field in range(7) for number in lanes[field::7]),
            *blocks[0::4],
            *blocks[1::4],
            *blocks[2::4],
            *blocks[3::4],
            *finals,
            *[0] * (shape.finals - len(finals)),
            *captures,
            *[0] * (shape.captures - len(captures)),
        ]
        return np.array(values, dtype=np.int64)


def next_power_of_2(count: int) -> int:
    """``count`` rounded up to a power of two; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count else 0


def round_kept(count: int) -> int:
    """``count`` rounded up to 0, 1, 4, 16, ...: a lane more to keep costs little, another recording much."""
    return 1 << -(-(count - 1).bit_length() // 2) * 2 if count else 0


def round_lanes(count: int) -> int:
    """``count`` rounded up: fine steps where a lane is a large part of the work, coarse ones above."""
    for limit, step in ((4, 1), (16, 2), (32, 4), (128, 8)):
        if count <= limit:
            return -(-count // step) * step
    return -(-count // 16) * 16

"""A request on a canvas: where its blocks lie, which rows it keeps, how far its block is."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from herald.config import OffloadConfig
from herald.decode import BlockState, CanvasPlan
from herald.engine.arena import DeviceArena
from herald.engine.canvas.full_forward import FullForward
from herald.engine.request import Request
from herald.engine.resident import ResidentSet


@dataclass(eq=False)
class CanvasRequest(Request):
    """See `Request`. Blocks are counted from the canvas's first position, which follows the prompt.

    Attributes:
        plan: how the canvas is decoded.
        refreshes: the rows of a block are chosen a second time while it is denoised.
        tokens: int64 [P + G] on the device, prompt and canvas; masked: bool [G], what is still to decode.
        state: of the block.
        full: the full forward that is due, None between two of them.
        turn: when it last had one, or a step.
        refreshed: step of the block that chose rows anew, 0 for none yet.
    """

    plan: CanvasPlan = field(kw_only=True)
    refreshes: bool = field(kw_only=True)
    tokens: torch.Tensor | None = None
    masked: torch.Tensor | None = None
    state: BlockState = field(default_factory=lambda: BlockState(0, 0))
    full: FullForward | None = None
    turn: int = 0
    refreshed: int = 0

    @property
    def keeps(self) -> bool:
        """Whether rows are kept from one step to the next."""
        return self.plan.cache != "none"

    @property
    def length(self) -> int:
        """Positions of prompt and canvas."""
        return len(self.prompt_ids) + self.plan.length

    @property
    def begin(self) -> int:
        """First position of the block."""
        return len(self.prompt_ids) + self.block * self.block_length

    @property
    def window(self) -> int:
        """Positions from the block's first on that a cached step computes."""
        return self.block_length if self.plan.cache == "dual" else self.length - self.begin

    @property
    def near(self) -> int:
        """Positions of the canvas outside the window."""
        return self.plan.length - self.window

    @property
    def last_block(self) -> int:
        return self.plan.num_blocks - 1

    @property
    def stored_positions(self) -> int:
        return len(self.prompt_ids) if self.refreshes else 0

    def prefix_of(self, block: int) -> int:
        return len(self.prompt_ids)

    def prompt_in_block(self, block: int) -> int:
        return 0

    def required_rows(self, offload: OffloadConfig) -> int:
        prefix, lead = self._kept()
        return lead + sum(ResidentSet.required_rows(offload, 1, prefix, prefix))

    def make_resident(self, arena: DeviceArena, offload: OffloadConfig) -> ResidentSet:
        """Slots for the prompt's rows; right before them, room for those of the canvas."""
        prefix, lead = self._kept()
        return ResidentSet(arena, offload, 1, prefix, prefix, lead)

    def drop_prefill(self) -> None:
        task, self.full = self.full, None
        if task is not None:
            task.close()

    def _kept(self) -> tuple[int, int]:
        """Positions of the prompt, and at most of the canvas, whose rows are kept."""
        return (len(self.prompt_ids), self.plan.length - self.block_length) if self.keeps else (0, 0)

"""Attention of the lanes of a step, in layers of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from herald.engine.lanes import StepInputs, StepShape
from herald_kernels import copy_rows, resident_attention

if TYPE_CHECKING:
    from herald.engine.runner import LaneRunner


class LaneAttention:
    """Attends to resident sets, or to the last positions in layers with a window.

    Args:
        runner: gives model and arenas.
        given: of the step.
        shape: of the step.
        final_is_causal: lanes whose tokens are taken as final are encoded causally.
    """

    def __init__(
        self, runner: LaneRunner, given: StepInputs, shape: StepShape, final_is_causal: bool
    ) -> None:
        self.model = runner.model
        self.arena = runner.arena
        self.windows = runner.windows
        self.given = given
        self.max_length = shape.max_length
        config = self.model.config
        self.parent = given.parent.to(torch.int32)
        self.causal = given.final.to(torch.int32) if final_is_causal else None
        self.length = self._for_heads(given.length, config.num_kv_heads)
        windowed = config.windowed
        if windowed is not None:
            # A lane behind another of this step sees what the rings held before that one.
            origin = torch.where(given.parent < 0, given.position, given.position[given.parent.clamp(min=0)])
            self.ring_length = self._for_heads(origin.clamp(max=windowed.window), windowed.num_kv_heads)

    def __call__(self, layer: int, q: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `herald_kernels.resident_attention`: ``q`` and ``rows`` of all lanes -> output and lse."""
        form, given = self.model.config.attention[layer], self.given
        if not form.window:
            return resident_attention(
                q,
                rows,
                self.arena.rows[form.place],
                given.row_start,
                self.length,
                self.parent,
                self.model.softmax_scale,
                self.max_length,
                causal=self.causal,
            )
        assert self.windows is not None
        return resident_attention(
            q,
            rows,
            self.windows.rows[form.place],
            given.window_start,
            self.ring_length,
            self.parent,
            self.model.softmax_scale,
            form.window,
            causal=self.causal,
            window=form.window,
            position=given.position,
        )

    def keep_window(self, rows: torch.Tensor) -> None:
        """Write final lanes' rows into their requests' rings.

        Args:
            rows: [F, layers, kv_heads, B, 2 * head_dim] of the layers with a window.
        """
        windowed, given = self.model.config.windowed, self.given
        assert windowed is not None and self.windows is not None
        finals, layers, heads, block, width = rows.shape
        lane = given.final_lane
        offset = torch.arange(block, device=rows.device)
        slots = (given.position[lane, None] + offset) % windowed.window + given.window_start[lane, None]
        # Padding brings no rows; of a block longer than the ring only its end is kept.
        real = given.free_rows.view(finals, -1)[:, :1] >= 0
        kept = real & (offset >= block - windowed.window)
        base = torch.arange(layers * heads, device=rows.device)[:, None] * self.windows.capacity
        target = torch.where(kept[:, None], base + slots[:, None], -1)
        copy_rows(self.windows.flat_rows, target.view(-1), rows.view(-1, width), None)

    @staticmethod
    def _for_heads(counts: torch.Tensor, heads: int) -> torch.Tensor:
        """int64 [N] -> int32 [N, heads]."""
        return counts.to(torch.int32).unsqueeze(1).repeat(1, heads)

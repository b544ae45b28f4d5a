"""Canvases under way, on the device: blocks without masks, which every step writes anew."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from herald.decode import Noise, NoisePolicy, NoiseRules, advance
from herald.engine.blocks import BlockTable, to_device
from herald.engine.lanes import StepInputs
from herald.engine.request import Request
from herald.models import BlockModel


class NoiseTable(BlockTable):
    """See `BlockTable`. All positions of a slot count as masked until its canvas is finished.

    Args:
        model: gives the vocabulary and the size of hidden states.
        noise: makes the tokens of a canvas that are not accepted, and those it starts as.

    Attributes:
        fresh: int64 [S, B], what the slot's next canvas starts as; a view of ``rows``.
        signal: [S + 1, B, hidden_size], what conditions the next step of each canvas, see
            `BlockModel.condition`; the last is zero, for lanes that nothing conditions.
        position, seed, step, stable: int64 [S]: first position of the current canvas, the request's seed,
            steps of the canvas so far, and see `herald.decode.NoiseStep`.
        rules: settings of every slot.
    """

    regions: ClassVar[int] = 4

    def __init__(self, block_length: int, num_slots: int, model: BlockModel, noise: Noise) -> None:
        config, device = model.config, model.device
        super().__init__(block_length, num_slots, config.mask_token_id, device)
        slots = self.num_slots
        self.vocab_size = config.vocab_size
        self.noise = noise
        self.fresh = self.rows[3 * slots : 4 * slots]
        self.signal = torch.zeros(
            slots + 1, block_length, config.hidden_size, dtype=model.dtype, device=device
        )
        self.position, self.seed, self.step, self.stable = torch.zeros(
            4, slots, dtype=torch.int64, device=device
        )
        self.rules = NoiseRules(
            steps=torch.ones(slots, dtype=torch.int64, device=device),
            entropy_bound=torch.zeros(slots, device=device),
            stop_entropy=torch.zeros(slots, device=device),
            t_min=torch.ones(slots, device=device),
            t_max=torch.ones(slots, device=device),
            stable_steps=torch.zeros(slots, dtype=torch.int64, device=device),
        )

    def fresh_row(self, slot: int) -> int:
        return 3 * self.num_slots + slot

    def begin(self, request: Request, seed: int) -> None:
        policy = request.policy
        assert isinstance(policy, NoisePolicy)
        chosen = policy.rules(request.params)
        slot = request.slot = self._free.pop()
        request.left = request.whole
        at = to_device(np.array([slot], dtype=np.int64), self.rows.device)
        self.position[slot] = request.first_prefix
        self.seed[slot] = seed
        self.rules.steps[slot] = chosen.max_steps
        self.rules.entropy_bound[slot] = chosen.entropy_bound
        self.rules.stop_entropy[slot] = chosen.stop_entropy
        self.rules.t_min[slot] = chosen.t_min
        self.rules.t_max[slot] = chosen.t_max
        self.rules.stable_steps[slot] = chosen.stable_steps
        self._renew(at, torch.ones_like(at, dtype=torch.bool), self._noise(at, self.position[at], 0))

    def open(self, given: StepInputs) -> None:
        slot, opening = given.slot, given.opening.bool()
        now = opening[:, None]
        self.closed[slot] = torch.where(now, self.tokens[slot], self.closed[slot])
        self.position[slot] = self.position[slot] + given.opening * self.block_length
        self._renew(slot, opening, self.fresh[slot])

    def lane_signal(self, source: torch.Tensor) -> torch.Tensor:
        """What conditions lanes that read rows ``source`` int64 [N]: [N * B, hidden_size]."""
        slot = torch.where(source < self.num_slots, source, self.num_slots)
        return self.signal.index_select(0, slot).flatten(0, 1)

    def temperature(self, slot: torch.Tensor) -> torch.Tensor:
        """Of the logits of the slots' next step, int64 [R] -> float32 [R]."""
        return self._rules_of(slot).temperature(self.step[slot])

    def advance(
        self, slot: torch.Tensor, best: torch.Tensor, candidate: torch.Tensor, entropy: torch.Tensor
    ) -> torch.Tensor:
        """End a step of the canvases of R slots; see `herald.decode.advance`.

        Returns:
            int64 [R, B + 1], the report: steps that may still come (0 for a finished canvas, -1 after logits
            that are not finite), then its tokens, -1 while it is not finished.
        """
        step = self.step[slot]
        noise = self._noise(slot, self.position[slot], step + 1)
        made = advance(
            self._rules_of(slot),
            step,
            best,
            self.draft[slot],
            self.stable[slot],
            candidate,
            entropy,
            noise,
        )
        done = made.left == 0
        self.tokens[slot] = made.tokens
        self.draft[slot] = best
        self.stable[slot] = made.stable
        self.step[slot] = step + 1
        self.masked[slot] = ~done[:, None].expand_as(best)
        shown = torch.where(done[:, None], best, -1)
        return torch.cat([made.left[:, None], shown], dim=1)

    def _renew(self, slot: torch.Tensor, chosen: torch.Tensor, start: torch.Tensor) -> None:
        """Let the canvases of the slots that are ``chosen`` begin as ``start`` int64 [R, B]."""
        now = chosen[:, None]
        self.tokens[slot] = torch.where(now, start, self.tokens[slot])
        self.draft[slot] = torch.where(now, start, self.draft[slot])
        self.masked[slot] = self.masked[slot] | now
        following = self._noise(slot, self.position[slot] + self.block_length, 0)
        self.fresh[slot] = torch.where(now, following, self.fresh[slot])
        self.step[slot] = torch.where(chosen, 0, self.step[slot])
        self.stable[slot] = torch.where(chosen, 0, self.stable[slot])
        self.signal[slot] = self.signal[slot].masked_fill(chosen[:, None, None], 0.0)

    def _noise(self, slot: torch.Tensor, position: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        steps = torch.full_like(position, step) if isinstance(step, int) else step
        return self.noise(self.seed[slot], position, steps, self.block_length, self.vocab_size)

    def _rules_of(self, slot: torch.Tensor) -> NoiseRules:
        return NoiseRules(*(setting[slot] for setting in self.rules))

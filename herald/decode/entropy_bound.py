"""Decoding of a canvas: accept tokens while their entropies stay below a bound, and renew the others.

A canvas starts as random tokens. A step divides the logits by a temperature that falls from ``t_max`` towards
``t_min`` (``t_min + (t_max - t_min) * n / N`` with n of N steps left), accepts positions in order of rising
entropy while the sum of the entropies accepted before is at most ``entropy_bound``, and puts fresh noise at
all others. Nothing that was accepted is kept for the next step. A canvas is finished when its arg-max tokens
did not change and their mean entropy is below ``stop_entropy``, or after N steps; then it is the arg-max
tokens.

Sources: entropy bound, Ben-Hamu et al. 2025, "Accelerated Sampling from Masked Diffusion Models via Entropy
Bounded Unmasking" (arXiv 2505.24857); schedule, noise and stop, DiffusionGemma as released in `transformers`
(``generation_diffusion_gemma.py``), whose released settings are the defaults of
`herald.models.noise_config.NoiseConfig`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class NoiseRules(NamedTuple):
    """Settings of R canvases; see `herald.models.noise_config.NoiseConfig`.

    Attributes:
        steps, stable_steps: int64 [R].
        entropy_bound, stop_entropy, t_min, t_max: float32 [R].
    """

    steps: torch.Tensor
    entropy_bound: torch.Tensor
    stop_entropy: torch.Tensor
    t_min: torch.Tensor
    t_max: torch.Tensor
    stable_steps: torch.Tensor

    def temperature(self, step: torch.Tensor) -> torch.Tensor:
        """Of the logits of steps ``step`` int64 [R], counted from 0: float32 [R]."""
        return self.t_min + (self.t_max - self.t_min) * ((self.steps - step) / self.steps)


class NoiseStep(NamedTuple):
    """What a step makes of R canvases.

    Attributes:
        tokens: int64 [R, B], the next canvas; the arg-max tokens where it is finished.
        stable: int64 [R], steps in a row, up to this one, whose arg-max tokens were those of the one before.
        left: int64 [R], steps that may still come: 0 if it is finished, -1 where an entropy is not finite.
    """

    tokens: torch.Tensor
    stable: torch.Tensor
    left: torch.Tensor


def accepted(entropy: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Positions to accept, bool [R, B], of their entropies float32 [R, B] and the bounds float32 [R]."""
    ordered, order = entropy.sort(dim=-1, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(entropy, dtype=torch.bool).scatter(-1, order, before <= bound[:, None])


def advance(
    rules: NoiseRules,
    step: torch.Tensor,
    best: torch.Tensor,
    best_before: torch.Tensor,
    stable: torch.Tensor,
    candidate: torch.Tensor,
    entropy: torch.Tensor,
    noise: torch.Tensor,
) -> NoiseStep:
    """One step of R canvases, from its logits at their temperature.

    Args:
        step: int64 [R], steps before this one.
        best, best_before: int64 [R, B], arg-max tokens of this step and of the one before.
        stable: int64 [R], see `NoiseStep`, of the step before.
        candidate: int64 [R, B], what is put at accepted positions: ``best``, or a draw.
        entropy: float32 [R, B], in nats.
        noise: int64 [R, B], what is put at the others.
    """
    same = (best == best_before).all(-1) & (step > 0)
    stable = torch.where(same, stable + 1, 0)
    done = (stable >= rules.stable_steps) & (entropy.mean(-1) < rules.stop_entropy)
    left = torch.where(done, 0, rules.steps - step - 1).clamp(min=0)
    tokens = torch.where(accepted(entropy, rules.entropy_bound), candidate, noise)
    tokens = torch.where((left == 0)[:, None], best, tokens)
    return NoiseStep(tokens, stable, torch.where(entropy.isfinite().all(-1), left, -1))

"""What a training run does when: learning rate, part of the curriculum, weight of the structured questions.

A run from nothing goes through the whole curriculum (`data.STAGES`). One that continues finished weights has
a schedule of its own, warm-up included, over the curriculum's last part.
"""

from __future__ import annotations

from dataclasses import dataclass

WARMUP, DECAY_FROM, FLOOR = 0.02, 0.62, 0.02


@dataclass(frozen=True)
class Schedule:
    """One training run, kept in its checkpoints.

    Args:
        seconds: training seconds in all.
        begin: place in the curriculum where the run begins, in [0, 1).
        peak: learning-rate factor between warm-up and decay.
        structured: factor on the weights of the questions `json` and `pairs`.
    """

    seconds: float
    begin: float = 0.0
    peak: float = 1.0
    structured: float = 1.0

    @classmethod
    def from_nothing(cls, seconds: float) -> Schedule:
        return cls(seconds)

    @classmethod
    def continued(cls, seconds: float) -> Schedule:
        """For finished weights: documents of 192 bytes to 8 KB for the first third, then of all lengths."""
        return cls(seconds, begin=0.7, peak=0.5, structured=2.0)

    def rate(self, progress: float) -> float:
        """Learning-rate factor at ``progress`` (0 to 1): warm-up, constant, linear decay at the end."""
        if progress < WARMUP:
            return self.peak * (progress + 1e-3) / WARMUP
        if progress < DECAY_FROM:
            return self.peak
        return self.peak * (FLOOR + (1 - FLOOR) * max(0.0, 1 - progress) / (1 - DECAY_FROM))

    def curriculum(self, progress: float) -> float:
        """Place in the curriculum (0 to 1) at ``progress``."""
        return self.begin + (1 - self.begin) * min(1.0, progress)

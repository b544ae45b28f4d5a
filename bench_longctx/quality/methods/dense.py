"""`dense`: every row stays on the device. What all other methods are compared with."""

from __future__ import annotations

from bench_longctx.quality.methods.base import Method, Switches
from herald.config import OffloadConfig


class Dense(Method):
    name = "dense"
    about = "full KV, no offload"
    uses_index = False
    uses_operator = False

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        return OffloadConfig(enabled=False)

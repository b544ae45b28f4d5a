"""What the device itself recorded: how many kernels ran, and for how much of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from herald.engine.trace import merged


@dataclass(frozen=True)
class KernelTimes:
    """Kernels of a stretch of time.

    Attributes:
        count: kernels, copies between host and device left out.
        busy_seconds: in which at least one ran.
        wall_seconds: from the first one's start to the last one's end.
    """

    count: int
    busy_seconds: float
    wall_seconds: float

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.wall_seconds if self.wall_seconds else 0.0


def record_kernels(work: Callable[[], object]) -> KernelTimes:
    """Run ``work`` under the CUDA profiler, which slows the host down a little."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    spans = [
        (event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith("Mem")
    ]
    if not spans:
        return KernelTimes(0, 0.0, 0.0)
    busy = merged(spans)
    return KernelTimes(len(spans), sum(end - start for start, end in busy), busy[-1][1] - busy[0][0])

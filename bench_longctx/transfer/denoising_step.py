"""A stand-in for a denoising step: the GEMMs of an 8B block model, replayed as one CUDA graph.

36 layers of hidden size 4096: qkv to 6144, output to 4096, gate and up to 24576, down from 12288, bfloat16.
No attention and no head: what a gather disturbs is a GEMM that expects every SM. On the CPU the same
operations run eagerly in a thread, small.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from herald.transfer.streams import DeviceClock


@dataclass(frozen=True)
class StepShape:
    """Sizes of the stand-in."""

    layers: int = 36
    hidden: int = 4096
    qkv: int = 6144
    mlp: int = 12288


TINY = StepShape(layers=2, hidden=64, qkv=96, mlp=128)


class Weights:
    """The projections of every layer, [in, out] each."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        sizes = (
            (shape.hidden, shape.qkv),
            (shape.hidden, shape.hidden),
            (shape.hidden, 2 * shape.mlp),
            (shape.mlp, shape.hidden),
        )
        self.layers = [
            [torch.empty(i, o, dtype=torch.bfloat16, device=device).normal_(0, i**-0.5) for i, o in sizes]
            for _ in range(shape.layers)
        ]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] through all layers."""
        width = (self.shape.hidden,)
        for qkv, out, gate_up, down in self.layers:
            mixed = F.rms_norm(hidden, width) @ qkv
            hidden = hidden + mixed[:, : width[0]] @ out
            gate, up = (F.rms_norm(hidden, width) @ gate_up).chunk(2, dim=1)
            hidden = hidden + (F.silu(gate) * up) @ down
        return hidden


class Replays:
    """Steps under way, one behind the other."""

    def done(self) -> bool:
        raise NotImplementedError

    def span(self) -> tuple[float, float]:
        """Start and end on the clock of `time.perf_counter`; waits for the end."""
        raise NotImplementedError


class CudaReplays(Replays):
    def __init__(self, graph: Any, stream: Any, count: int, clock: DeviceClock) -> None:
        self._clock = clock
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._issued = time.perf_counter()
        with torch.cuda.stream(stream):
            self._start.record()
            for _ in range(count):
                graph.replay()
            self._end.record()

    def done(self) -> bool:
        return self._end.query()

    def span(self) -> tuple[float, float]:
        self._end.synchronize()
        return self._clock.span(self._start, self._end, self._issued)


class HostReplays(Replays):
    def __init__(self, future: Future[tuple[float, float]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def span(self) -> tuple[float, float]:
        return self._future.result()


class DenoisingStep:
    """The stand-in for one batch size, captured on a stream.

    Args:
        weights: of the layers.
        requests: B; a step has 32 rows of each.
        stream: to capture and replay on; None for one of its own, or on the CPU.

    Attributes:
        replay_stream: where the graph is replayed: ``stream``, or another one where that cannot be timed. A
            kernel of a graph runs in the context it was captured in, wherever the graph is launched.
    """

    def __init__(self, weights: Weights, requests: int, stream: Any = None) -> None:
        self.weights = weights
        self.requests = requests
        self.hidden = torch.randn(32 * requests, weights.shape.hidden, device=weights.device).bfloat16()
        self._worker: ThreadPoolExecutor | None = None
        if weights.device.type != "cuda":
            self._worker = ThreadPoolExecutor(1)
            return
        self.stream = stream if stream is not None else torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            for _ in range(3):
                weights.forward(self.hidden)
        torch.cuda.synchronize()
        self._clock = DeviceClock(weights.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph, stream=self.stream):
            self.out = weights.forward(self.hidden)
        self.replay_stream = self.stream
        try:
            torch.cuda.Event(enable_timing=True).record(self.stream)
        except RuntimeError:
            self.replay_stream = torch.cuda.Stream()

    def start(self, count: int) -> Replays:
        """Begin ``count`` steps; returns at once."""
        if self._worker is None:
            return CudaReplays(self._graph, self.replay_stream, count, self._clock)
        return HostReplays(self._worker.submit(self._run, count))

    def seconds(self, count: int) -> float:
        """Seconds a step takes with nothing beside it: the better of two runs."""
        best = float("inf")
        for _ in range(2):
            start, end = self.start(count).span()
            best = min(best, (end - start) / count)
        return best

    def _run(self, count: int) -> tuple[float, float]:
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(count):
                self.weights.forward(self.hidden)
        return start, time.perf_counter()

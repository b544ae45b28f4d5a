"""Times of device work inside a CUDA graph, and the limits of the hardware measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]

# A graph's launches touch more than this between two uses of a buffer: several times the L2 cache of an H200.
COLD_BYTES = 200 << 20
MAX_BUFFERS = 64


@dataclass(frozen=True)
class Limits:
    """What the device does at best, measured.

    Args:
        copy_bytes_per_s: bytes read plus bytes written of a large copy.
        flop_per_s: of a large bf16 matrix product.
    """

    copy_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True)
class Figure:
    """One measured time beside its floor.

    Args:
        part, name, shape: what was measured.
        seconds: median of one call.
        floor_seconds: the larger of the byte and the FLOP floor.
        num_bytes, flop: that the call must move and compute.
    """

    part: str
    name: str
    shape: str
    seconds: float
    floor_seconds: float
    num_bytes: float
    flop: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def table(figures: Sequence[Figure]) -> str:
    """Figures of one part for people: a row a shape, a column a name, us and multiples of the floor."""
    names, shapes = ([*dict.fromkeys(getattr(f, key) for f in figures)] for key in ("name", "shape"))
    cells = {(f.shape, f.name): f"{f.seconds * 1e6:.1f} x{f.seconds / f.floor_seconds:.2f}" for f in figures}
    widths = [max(len(name), *(len(cells.get((shape, name), "")) for shape in shapes)) for name in names]
    first = max(map(len, [*shapes, figures[0].part]))
    lines = ["  ".join([figures[0].part.ljust(first), *map(str.rjust, names, widths)])]
    for shape in shapes:
        row = [cells.get((shape, name), "").rjust(width) for name, width in zip(names, widths, strict=True)]
        lines.append("  ".join([shape.ljust(first), *row]))
    return "\n".join(lines)


def num_buffers(bytes_each: int) -> int:
    """How many copies of its input a call needs so that none is found in the L2 cache."""
    return max(2, min(MAX_BUFFERS, -(-COLD_BYTES // max(1, bytes_each)) + 1))


def seconds_each(calls: Sequence[Call], repeats: int = 20) -> float:
    """Median seconds of one of ``calls``, which run one after the other, on CUDA inside one graph."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    replay = record(calls)
    replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        replay()
        end_event.record()
        end_event.synchronize()
        times.append(start_event.elapsed_time(end_event) / 1e3)
    return statistics.median(times) / len(calls)


def record(calls: Sequence[Call]) -> Call:
    """A CUDA graph of ``calls``, as a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles kernels and sets libraries up, which a recording must not do
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


def measure_limits(tiny: bool) -> Limits:
    """The copy rate, of a kernel or of the device's own copy, and the matrix rate of this device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 1 << (20 if tiny else 30)
    source, target = (torch.ones(size // 4, dtype=torch.float32, device=device) for _ in range(2))
    kernel = seconds_each([lambda: torch.neg(source, out=target)] * 4)
    copy = min(kernel, seconds_each([lambda: target.copy_(source)] * 4))
    n = 256 if tiny else 8192
    left, right = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    product = seconds_each([lambda: left @ right] * 4)
    return Limits(2 * size / copy, 2 * n**3 / product)


def figure(
    part: str, name: str, shape: str, seconds: float, num_bytes: float, flop: float, limits: Limits
) -> Figure:
    """A figure with its floor by ``limits``."""
    floor = max(num_bytes / limits.copy_bytes_per_s, flop / limits.flop_per_s)
    return Figure(part, name, shape, seconds, floor, num_bytes, flop)

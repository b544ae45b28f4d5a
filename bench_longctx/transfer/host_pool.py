"""How long a host pool takes to be ready, and which part of that is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from herald import hardware
from herald.kvstore import HostSlab, host_memory

Result = dict[str, Any]


def slabs(num_bytes: int, pin: bool) -> Iterator[Result]:
    """`HostSlab` as the engine makes it: first, second and third time, in memory used before or not."""
    for nth in ("first", "second", "third"):
        slab = HostSlab(num_bytes, pin=pin)
        result = {"what": f"HostSlab, {nth}", "pinned": slab.pinned, **_rounded(slab.seconds)}
        yield result | {"close": round(_timed(slab.close), 3)}


def parts(num_bytes: int, pin: bool) -> Iterator[Result]:
    """First touch and registration apart, each in several ways."""
    cores = hardware.usable_cores()
    for threads in sorted({min(4, cores), max(1, cores // 2), cores}):
        with HostSlab(num_bytes, pin=False, num_threads=threads) as slab:
            yield {"what": f"touch, {threads} threads", **_rounded(slab.seconds)}
    if not (pin and torch.cuda.is_available()):
        return
    runtime, _ = host_memory._cuda_runtime()
    assert runtime is not None
    for piece_bytes in (256 << 20, 1 << 30):
        for threads in (1, 4):
            with HostSlab(num_bytes, pin=False) as slab:
                yield _register(runtime, slab, piece_bytes, threads)


def _register(runtime: Any, slab: HostSlab, piece_bytes: int, threads: int) -> Result:
    end = slab.address + slab.num_bytes
    addresses = range(slab.address, end, piece_bytes)
    seconds = _timed(
        lambda: _each(lambda at: runtime.register(at, min(piece_bytes, end - at)), addresses, threads)
    )
    what = f"register, pieces of {piece_bytes >> 20} MiB, {threads} threads"
    released = _timed(lambda: _each(runtime.unregister, addresses, 1))
    return {"what": what, "all": round(seconds, 3), "close": round(released, 3)}


def _each(work: Callable[[int], None], addresses: range, threads: int) -> None:
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, addresses))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}

"""Copy bandwidth: within host memory, and between host and GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from herald import hardware
from herald.doctor.device import cuda_available
from herald.doctor.finding import Finding
from herald.doctor.units import format_bytes

HOST_BYTES = 256 << 20
DEVICE_BYTES = 256 << 20
REPEATS = 3


def probe_bandwidth(num_bytes: int = HOST_BYTES) -> Finding:
    """Bytes copied per second (each byte is counted once): best of a few runs."""
    value: dict[str, float | None] = {
        "host_copy": host_copy_rate(num_bytes),
        "to_device": None,
        "to_host": None,
    }
    text = [f"host copy {format_bytes(value['host_copy'] or 0)}/s on {hardware.usable_cores()} threads"]
    advice = ""
    if cuda_available():
        to_device, to_host, pinned = device_copy_rates(DEVICE_BYTES)
        value.update(to_device=to_device, to_host=to_host)
        text.append(f"to GPU {format_bytes(to_device)}/s, to host {format_bytes(to_host)}/s")
        if not pinned:
            advice = "host memory could not be pinned, which halves these figures; see memlock"
    return Finding("bandwidth", dict(value), tuple(text), advice)


def best_rate(copy: Callable[[], None], num_bytes: int, repeats: int = REPEATS) -> float:
    """Bytes per second of the fastest of ``repeats`` calls, after one that is not counted."""
    copy()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        copy()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def host_copy_rate(num_bytes: int) -> float:
    """Parallel copy between two host buffers, bytes per second."""
    import numpy as np

    threads = hardware.usable_cores()
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    piece = -(-num_bytes // threads)
    parts = [slice(start, start + piece) for start in range(0, num_bytes, piece)]

    with ThreadPoolExecutor(threads) as executor:

        def copy_part(part: slice) -> None:
            target[part] = source[part]

        def copy_all() -> None:
            for _ in executor.map(copy_part, parts):
                pass

        return best_rate(copy_all, num_bytes)


def device_copy_rates(num_bytes: int) -> tuple[float, float, bool]:
    """(bytes per second to the GPU, bytes per second back, whether the host side was pinned)."""
    import torch

    from herald.kvstore import HostSlab

    with HostSlab(num_bytes, pin=True) as slab:
        host = slab.tensor(torch.uint8, (num_bytes,))
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

        def to_device() -> None:
            device.copy_(host, non_blocking=True)
            torch.cuda.synchronize()

        def to_host() -> None:
            host.copy_(device, non_blocking=True)
            torch.cuda.synchronize()

        rates = best_rate(to_device, num_bytes), best_rate(to_host, num_bytes), slab.pinned
    return rates

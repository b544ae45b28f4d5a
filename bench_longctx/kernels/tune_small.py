"""Tries strips and warps of the element-wise kernels, and says which is best where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench_longctx.kernels.small import fusions, repeat
from herald_kernels.ops import tiles
from herald_kernels.ops.tiles import Strip

TOKENS, TINY_TOKENS = (32, 256, 640, 1280), (8, 16)
# What of the table a variant replaces, and the variants.
GRID: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "rms_norm": (("RMS_NORM_WARPS",), (2, 4, 8, 16)),
    "silu_mul": (
        ("SILU_MUL",),
        tuple(Strip(size, warps) for size in (512, 1024, 2048, 4096) for warps in (2, 4, 8)),
    ),
    "qk_norm_rope": (
        ("ROTATE", "ROTATE_MANY"),
        tuple(Strip(size, warps, heads) for size in (8, 16) for warps in (1, 2, 4) for heads in (1, 2, 4)),
    ),
}


@contextmanager
def chosen(names: tuple[str, ...], value: Any) -> Iterator[None]:
    """Run with this value in the table."""
    before = {name: getattr(tiles, name) for name in names}
    try:
        for name in names:
            setattr(tiles, name, value)
        yield
    finally:
        for name, old in before.items():
            setattr(tiles, name, old)


def label(value: Any) -> str:
    """Short form of a variant: size/warps/heads, or warps."""
    return f"{value.size}/{value.num_warps}/{value.heads}" if isinstance(value, Strip) else str(value)


def tune_small(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Time every variant; prints a line an operation and size, returns all."""
    results = []
    print("\nelement-wise, us: as it is | best of size/warps/heads (rms_norm: warps)")
    for tokens in TINY_TOKENS if tiny else TOKENS:
        for name, make, call, num_bytes in fusions(device, tiny, tokens):
            if name not in GRID:
                continue
            names, values = GRID[name]
            times = {"as it is": repeat(make, call, num_bytes, device)}
            for value in values[:2] if tiny else values:
                with chosen(names, value):
                    times[label(value)] = repeat(make, call, num_bytes, device)
            results += [
                {"case": f"{name}, {tokens} tokens", "label": key, "seconds": seconds, "num_bytes": num_bytes}
                for key, seconds in times.items()
            ]
            now = times.pop("as it is")
            best = sorted(times, key=lambda key: times[key])[:4]
            print(
                f"{name:12} {tokens:5} {now * 1e6:6.1f} {num_bytes / now / 1e12:5.2f} TB/s | "
                + "  ".join(f"{times[key] * 1e6:.1f} {key}" for key in best),
                flush=True,
            )
    if device == "cuda":
        torch.cuda.empty_cache()
    return results

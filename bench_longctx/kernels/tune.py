"""Tries tiles and cuts of the attention kernels, and says which is best where.

Variants are compiled by several processes at once into Triton's cache; each is checked against the reference
before it is timed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bench_longctx.kernels.attention import (
    SDAR_8B,
    TINY,
    Resident,
    ResidentInput,
    assert_close,
    prefill_flop,
    prefill_input,
)
from bench_longctx.kernels.timing import seconds_each
from herald_kernels import prefill_attention, resident_attention
from herald_kernels.ops.prefill_attention import reference as prefill_reference
from herald_kernels.ops.resident_attention import reference as resident_reference
from herald_kernels.ops.resident_attention.splits import Plan
from herald_kernels.ops.tiles import Tiles

RESIDENT = (
    Resident(1, 1638),
    Resident(2, 1638),
    Resident(4, 1638),
    Resident(8, 1638),
    Resident(16, 1638),
    Resident(20, 1638),
    Resident(24, 1638, 3),
    Resident(40, 1638),
    Resident(1, 6553),
    Resident(16, 6553),
    Resident(1, 32_768),
    Resident(8, 32_768),
)
PREFILL = ((4096, 32_768),)
# All variants have to be compiled and checked within this.
COMPILE_SECONDS = 40

# Queries, keys, warps, stages.
VARIANTS = {
    "resident_attention": (
        Tiles(64, 64, 4, 3),
        Tiles(64, 64, 4, 2),
        Tiles(64, 32, 4, 4),
        Tiles(128, 64, 8, 3),
        Tiles(128, 128, 8, 3),
    ),
    "prefill_attention": (Tiles(128, 128, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3)),
}
TINY_VARIANTS = (Tiles(16, 16, 4, 2), Tiles(32, 32, 4, 1, descriptors=False))
SHOWN = 3


@contextmanager
def forced(op: str, tile: Tiles, pieces: int | None = None) -> Iterator[None]:
    """Run ``op`` with these tiles and, if given, so many pieces of the longest set."""
    module: Any = importlib.import_module(f"herald_kernels.ops.{op}.triton_kernel")

    def plan(num_tiles: int, *_: Any) -> Plan:
        each = -(-num_tiles // min(pieces or 1, num_tiles))
        return Plan(each, -(-num_tiles // each))

    names = {"resident_tiles" if op == "resident_attention" else "prefill_tiles": lambda *_: tile}
    if pieces is not None:
        names["plan"] = plan
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def cuts(case: Resident, tile: Tiles, kv_heads: int) -> Iterator[int | None]:
    """Numbers of pieces to cut the sets of a call into; None as planned."""
    yield None
    programs = case.lanes * kv_heads * -(-128 // tile.queries)
    for pieces in (1, 2, 3, 4, 6, 8, 12, 16, 24):
        # Neither an idle device nor many waves of pieces are worth the time.
        if pieces == 1 or (90 <= programs * pieces <= 800 and pieces * 128 <= case.rows):
            yield pieces


def verify(op: str, tile: Tiles, device: str) -> str:
    """Compile a variant and hold it to the reference; what is wrong with it, or an empty string."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, case = (SDAR_8B, Resident(4, 701, 2)) if device == "cuda" else (TINY, Resident(2, 70, 2))
    torch.manual_seed(0)
    try:
        if op == "resident_attention":
            given = ResidentInput(heads, case, device, dtype)
            with forced(op, tile, 3):
                out, lse = resident_attention(*given.arguments(0))
            expected, expected_lse = resident_reference.resident_attention(*given.arguments(0))
            assert_close(lse, expected_lse, 1e-5, "lse")
        else:
            q, rows = prefill_input(heads, 4 * heads.block, 700, device, dtype)
            arguments = (q, rows, 700 - 4 * heads.block, heads.block, heads.dim**-0.5)
            with forced(op, tile):
                out = prefill_attention(*arguments)
            expected = prefill_reference.prefill_attention(*arguments)
        assert_close(out, expected, 8e-3, "out")
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return ""


def _verify_on_gpu(task: tuple[str, Tiles]) -> str:
    return verify(*task, "cuda")


def outcome(result: Any, timeout: float) -> str:
    """What a process says of a variant, or that it said nothing in time."""
    try:
        return str(result.get(max(0.1, timeout)))
    except multiprocessing.TimeoutError:
        return f"not done within {COMPILE_SECONDS} s"


def usable(tasks: list[tuple[str, Tiles]], device: str) -> list[tuple[str, Tiles]]:
    """The variants that compile and agree with the reference."""
    start = time.perf_counter()
    if device == "cuda":
        workers = max(1, min(len(tasks), 12, (os.cpu_count() or 2) - 2))
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pending = [pool.apply_async(_verify_on_gpu, (task,)) for task in tasks]
            problems = [outcome(result, start + COMPILE_SECONDS - time.perf_counter()) for result in pending]
    else:
        problems = [verify(*task, device) for task in tasks]
    print(f"{len(tasks)} variants compiled and checked in {time.perf_counter() - start:.1f} s", flush=True)
    for (op, tile), problem in zip(tasks, problems, strict=True):
        if problem:
            print(f"  left out: {op} {label(tile)}: {problem}")
    return [task for task, problem in zip(tasks, problems, strict=True) if not problem]


def label(tile: Tiles) -> str:
    """Short form of a variant."""
    loader = "" if tile.descriptors else ", pointers"
    return f"{tile.queries}x{tile.keys}/{tile.num_warps}w/{tile.num_stages}s{loader}"


def tune(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Time every usable variant on every shape; prints the best, returns all."""
    variants = dict.fromkeys(VARIANTS, TINY_VARIANTS) if tiny else VARIANTS
    tasks = usable([(op, tile) for op, found in variants.items() for tile in found], device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = TINY if tiny else SDAR_8B
    results: list[dict[str, Any]] = []
    for case in (Resident(2, 70, 2),) if tiny else RESIDENT:
        given = ResidentInput(heads, case, device, dtype)
        calls = given.calls()
        found = [{"label": "as it is", "seconds": seconds_each(calls, repeats=8)}]
        for tile in (tile for op, tile in tasks if op == "resident_attention"):
            for pieces in (1, 3, None) if tiny else cuts(case, tile, heads.kv):
                with forced("resident_attention", tile, pieces):
                    seconds = seconds_each(calls, repeats=8)
                way = "as planned" if pieces is None else f"{pieces} pieces"
                found.append(
                    {
                        "label": f"{label(tile)}, {way}",
                        "seconds": seconds,
                        "tile": asdict(tile),
                        "pieces": pieces,
                    }
                )
        results += report(f"resident, {case}", given.num_bytes, given.flop, found)
    for queries, num_rows in ((40, 100),) if tiny else PREFILL:
        q, rows = prefill_input(heads, queries, num_rows, device, dtype)
        call = partial(prefill_attention, q, rows, num_rows - queries, heads.block, heads.dim**-0.5)
        found = [{"label": "as it is", "seconds": seconds_each([call], repeats=5)}]
        for tile in (tile for op, tile in tasks if op == "prefill_attention"):
            with forced("prefill_attention", tile):
                seconds = seconds_each([call], repeats=5)
            found.append({"label": label(tile), "seconds": seconds, "tile": asdict(tile)})
        flop = prefill_flop(heads, queries, num_rows)
        results += report(f"prefill, {queries} x {num_rows}", rows.nbytes, flop, found)
    return results


def report(name: str, num_bytes: float, flop: float, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the best and what runs without tuning."""
    found.sort(key=lambda result: result["seconds"])
    print(name)
    for rank, result in enumerate(found):
        if rank < SHOWN or result["label"].startswith("as it is"):
            seconds = result["seconds"]
            rates = f"{num_bytes / seconds / 1e12:5.2f} TB/s {flop / seconds / 1e12:4.0f} TFLOP/s"
            print(f"  {seconds * 1e6:7.1f} us {rates}  {result['label']}", flush=True)
    return [{"case": name, **result} for result in found]

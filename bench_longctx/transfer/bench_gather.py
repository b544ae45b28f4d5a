"""Rows from page-locked host memory to the device: GB/s of each way.

    python -m bench_longctx.transfer.bench_gather --json gather.json

Measures the zero-copy kernels, one launch a move, by blocks, row size and shared memory, staged transfers
by threads that pack, and one plain copy of as many bytes, which is the ceiling. Every transfer's rows are
compared with their source first; a way that delivers wrong rows gets no figure. Rates are medians; the
device's other streams are idle. What each way costs a block that is being denoised meanwhile:
`bench_interference`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_longctx import machine, output
from bench_longctx.options import at_least, need_cuda
from bench_longctx.transfer import variants
from herald.errors import HeraldError, InvalidOption
from herald.kvstore import HostSlab
from herald.transfer import RowMove, StagedTransfer, Transfer, ZeroCopyTransfer, verify_rows

Result = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pool-mib", type=at_least(1), default=4096, help="size of the host pool (default 4096)"
    )
    parser.add_argument(
        "--move-mib", type=at_least(1), default=128, help="bytes of one transfer (default 128)"
    )
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--blocks", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--shared-kib", type=int, nargs="+", default=[32, 200], help="of a block")
    parser.add_argument("--pack-threads", type=at_least(1), nargs="+", default=[4, 8, 16])
    parser.add_argument("--unsorted", action="store_true", help="ids in random order")
    parser.add_argument("--repeats", type=at_least(1), default=9)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


def measure(transfer: Transfer, move: RowMove, repeats: int) -> float:
    """Median GB/s of transfers by their own events, after one that is checked."""
    transfer.arena_rows.zero_()
    torch.cuda.synchronize()
    transfer.submit(move).wait_host()
    verify_rows(move, transfer.pool_rows, transfer.arena_rows)
    seconds = []
    for _ in range(repeats):
        ticket = transfer.submit(move)
        ticket.wait_host()
        assert ticket.seconds is not None
        seconds.append(ticket.seconds)
    return len(move) * transfer.row_bytes / statistics.median(seconds) / 1e9


def measure_copy(pool: torch.Tensor, arena: torch.Tensor, repeats: int) -> float:
    """Median GB/s of one copy of contiguous page-locked rows."""
    rates = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        arena.copy_(pool[: len(arena)], non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(arena.nbytes / start.elapsed_time(end) / 1e6)
    return statistics.median(rates[1:])


def run(options: argparse.Namespace, slab: HostSlab, row_bytes: int) -> Iterator[Result]:
    """Figures of one row size."""
    pool = slab.tensor(torch.bfloat16, (slab.num_bytes // row_bytes, row_bytes // 2))
    n = (options.move_mib << 20) // row_bytes
    arena = torch.empty(n, row_bytes // 2, dtype=torch.bfloat16, device="cuda")
    src = np.random.default_rng(0).choice(len(pool), n, replace=False).astype(np.int64)
    move = RowMove(src if options.unsorted else np.sort(src), np.arange(n, dtype=np.int64))
    yield {"way": "memcpy", "row_bytes": row_bytes, "gb_per_s": measure_copy(pool, arena, options.repeats)}
    shapes = [variants.registers(), *(variants.bulk(kib, row_bytes) for kib in options.shared_kib)]
    for kernel in shapes:
        with ZeroCopyTransfer(pool, arena, kernel=kernel, launch_bytes=0) as zero_copy:
            for blocks in options.blocks:
                zero_copy.blocks = blocks
                yield {
                    "way": f"zero_copy ({kernel.name})",
                    "row_bytes": row_bytes,
                    "blocks": blocks,
                    "shared_bytes": kernel.shared_bytes(row_bytes),
                    "gb_per_s": measure(zero_copy, move, options.repeats),
                }
    for pack_threads in options.pack_threads:
        with StagedTransfer(pool, arena, num_threads=pack_threads) as staged:
            yield {
                "way": f"staged ({staged.packer_name})",
                "row_bytes": row_bytes,
                "pack_threads": pack_threads,
                "gb_per_s": measure(staged, move, options.repeats),
            }


@output.command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    output.check_file(options.json)
    if options.move_mib > options.pool_mib:
        raise InvalidOption(
            f"--move-mib {options.move_mib} is more than the pool", f"use {options.pool_mib} at most"
        )
    need_cuda(False, "run it on a machine with a GPU")
    results = []
    with HostSlab(options.pool_mib << 20, pin=True) as slab:
        if not slab.pinned:
            raise HeraldError(
                f"the pool is not page-locked ({slab.pin_reason})",
                "allow more locked memory, or use a smaller --pool-mib",
            )
        words = slab.tensor(torch.int64, (slab.num_bytes // 8,))
        torch.arange(len(words), out=words)
        del words
        for row_bytes in options.row_bytes:
            for result in run(options, slab, row_bytes):
                results.append(result)
                print(
                    "  ".join(
                        f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in result.items()
                    )
                )
    report = {
        "machine": machine.describe(),
        "sorted": not options.unsorted,
        "move_bytes": options.move_mib << 20,
        "results": results,
    }
    output.write_report(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

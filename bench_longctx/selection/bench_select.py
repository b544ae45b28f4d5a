"""Speed of the key index's build and of a selection on this CPU.

    python -m bench_longctx.selection.bench_select --rows 32768 --layers 36 --queries 128

Prints median seconds, token-heads a second (one token's key in one KV head of one layer; all threads
together, and per thread) and the bytes that pass by: keys of the pool for the build, codes and scales (the
keys, with 16 bits) for a selection.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from herald.hardware import usable_cores
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.select import Selector
from herald.select.tiles import HAS_VNNI

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="positions of the prefix")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--queries", type=int, default=128, help="query rows a KV head: positions x grouped heads"
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 1, 16], choices=[16, 8, 4, 1])
    parser.add_argument("--operator", choices=["max", "sum"], default="max")
    parser.add_argument("--budget", type=float, default=0.08, help="selected rows / rows")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0 for all usable cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-vnni", action="store_true", help="measure the float path")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser.parse_args()


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of ``work`` after one run that compiles and warms up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fill(pool: HostPool) -> None:
    """Random rows, without a second copy of the pool in float32."""
    generator = torch.Generator().manual_seed(0)
    page = torch.randn(pool.rows.shape[2:], generator=generator)
    for layer in range(pool.rows.shape[0]):
        for number in range(pool.rows.shape[1]):
            pool.rows[layer, number] = page.roll(layer * 31 + number * 7, dims=1)


def measure(
    pool: HostPool, bits: int, threads: int, arguments: argparse.Namespace
) -> list[dict[str, object]]:
    layout, rows = pool.layout, arguments.rows
    pages = np.arange(pool.num_pages, dtype=np.int32)
    token_heads = rows * layout.num_layers * layout.num_kv_heads
    shape = (layout.num_layers, arguments.queries, layout.num_kv_heads, layout.head_dim)
    queries = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    lse = np.zeros(shape[:3], dtype=np.float32)
    vnni = False if arguments.no_vnni else None
    results = []
    with KeyIndex(pool, bits) as index, ThreadPoolExecutor(threads) as executor:  # type: ignore[arg-type]
        selector = Selector(pool, index, arguments.operator, threads, vnni)
        key_bytes = layout.head_dim * layout.dtype.itemsize
        index.append_span(pages, 0, rows, executor=executor)
        if bits < 16:
            seconds = median_seconds(
                lambda: index.append_span(pages, 0, rows, executor=executor), arguments.repeats
            )
            results.append({"what": "build", "seconds": seconds, "bytes": key_bytes * token_heads})
        k = max(1, int(rows * arguments.budget))
        seconds = median_seconds(
            lambda: selector.select(pages, 0, rows, k, queries, lse, layout.head_dim**-0.5), arguments.repeats
        )
        row_bytes = key_bytes if bits == 16 else index.codes.shape[-1] + 4
        results.append({"what": "select", "seconds": seconds, "bytes": row_bytes * token_heads})
        selector.close()
    for result in results:
        seconds, num_bytes = float(result["seconds"]), int(result.pop("bytes"))  # type: ignore[arg-type, call-overload]
        result["bits"] = bits
        result["token_heads_per_second"] = token_heads / seconds
        result["per_thread"] = token_heads / seconds / threads
        result["gigabytes_per_second"] = num_bytes / seconds / 1e9
    return results


def main() -> None:
    arguments = parse_arguments()
    threads = arguments.threads or usable_cores()
    layout = RowLayout(
        arguments.layers, arguments.heads, arguments.head_dim, arguments.page_size, DTYPES[arguments.dtype]
    )
    setting = {
        name: getattr(arguments, name)
        for name in ("rows", "layers", "heads", "head_dim", "queries", "operator", "page_size", "dtype")
    }
    setting |= {"threads": threads, "vnni": HAS_VNNI and not arguments.no_vnni}
    if not arguments.json:
        print(", ".join(f"{name} {value}" for name, value in setting.items()))
    with HostPool(layout, layout.pages_for(arguments.rows), pin=False) as pool:
        fill(pool)
        for bits in arguments.bits:
            for result in measure(pool, bits, threads, arguments):
                if arguments.json:
                    print(json.dumps(setting | result))
                    continue
                print(
                    f"{result['what']:6s} {bits:2d} bits  {result['seconds']:8.4f} s  "
                    f"{result['token_heads_per_second'] / 1e6:8.2f} M token-heads/s  "
                    f"{result['per_thread'] / 1e6:7.2f} M a thread  "
                    f"{result['gigabytes_per_second']:6.2f} GB/s"
                )


if __name__ == "__main__":
    main()

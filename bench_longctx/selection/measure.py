"""What `bench_select` measures: scans, plans of updates, what a finished block costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from herald.hardware import usable_cores
from herald.jit import jit
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.kvstore.native import find_native
from herald.select import Selector, SlotGeometry
from herald.select.device_scan import ScanJob

HEAD_DIM, PAGE, BLOCK = 128, 64, 32
REPEATS = 5
Result = dict[str, Any]


def median_seconds(work: Callable[[], object]) -> float:
    """Median time of ``work`` after one run that compiles and warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make_pool(layers: int, heads: int, rows: int) -> HostPool:
    """Random rows, one page's worth that differs from page to page only by where it starts."""
    layout = RowLayout(layers, heads, HEAD_DIM, PAGE, torch.bfloat16)
    pool = HostPool(layout, layout.pages_for(rows), pin=False)
    page = torch.randn((heads, 2 * PAGE, 2 * HEAD_DIM), generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer in range(layers):
        for number in range(pool.num_pages):
            start = (layer * 31 + number * 7) % PAGE
            pool.rows[layer, number] = page[:, start : start + PAGE]
    return pool


@jit
def _sum_words(words: np.ndarray) -> int:
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def read_bandwidth(index: KeyIndex, threads: int) -> float:
    """Bytes a second at which ``threads`` threads read the codes."""
    words = index.codes.reshape(-1).view(np.uint64)
    with ThreadPoolExecutor(threads) as executor:
        parts = np.array_split(words, threads)
        return words.nbytes / median_seconds(lambda: list(executor.map(_sum_words, parts)))


def scan_paths(tiny: bool) -> list[tuple[str, str]]:
    """(backend, instruction set), best first."""
    native = find_native().module
    isas = [] if native is None else [name for name, why in native.scan_isas().items() if not why]
    return [*(("native", isa) for isa in isas if tiny or isa != "scalar"), ("numba", "auto")]


def scans(pool: HostPool, index: KeyIndex, where: str, threads: list[int], tiny: bool) -> Iterator[Result]:
    layout, rows = pool.layout, pool.num_pages * PAGE
    pages = np.arange(pool.num_pages, dtype=np.int32)
    token_heads = rows * layout.num_layers * layout.num_kv_heads
    for query_rows in (16, 64, 128):
        shape = (layout.num_layers, query_rows // 4, 4 * layout.num_kv_heads, HEAD_DIM)
        queries = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        lse = np.zeros(shape[:3], dtype=np.float32)
        for number, (backend, isa) in enumerate(scan_paths(tiny)):
            for count in threads if number == 0 else threads[-1:]:
                selector = Selector(pool, index, "max", count, backend, isa)  # type: ignore[arg-type]
                arguments = (pages, 0, rows, rows // 20, queries, lse, HEAD_DIM**-0.5)
                seconds = median_seconds(lambda: selector.select(*arguments))  # noqa: B023
                selector.close()
                yield {
                    "what": "select",
                    "where": where,
                    "path": f"{backend} {selector.isa}",
                    "bits": index.bits,
                    "query_rows": query_rows,
                    "threads": count,
                    "seconds": seconds,
                    "token_heads_per_second": token_heads / seconds,
                    "bytes_per_second": token_heads * index.bytes_per_row / seconds,
                }
        yield from shared_scans(index, where, threads[-1], (queries, lse))


def shared_scans(
    index: KeyIndex, where: str, threads: int, asked: tuple[np.ndarray, np.ndarray]
) -> Iterator[Result]:
    """The CPU with the device beside it, and the device alone."""
    if not index.pinned:
        return
    pool = index.pool
    layout, rows = pool.layout, pool.num_pages * PAGE
    pages = np.arange(pool.num_pages, dtype=np.int32)
    token_heads = rows * layout.num_layers * layout.num_kv_heads
    selector = Selector(pool, index, "max", threads, device=torch.device("cuda"))
    scan, native = selector.device_scan, find_native().module
    if scan is None or native is None or not scan.pays(pages, 0, rows):
        selector.close()
        return
    scale, k = HEAD_DIM**-0.5, rows // 20
    out = np.empty((layout.num_layers, layout.num_kv_heads, k), dtype=np.int32)
    job = ScanJob(pages, 0, rows, *asked, scale, out)
    tasks = layout.num_layers * layout.num_kv_heads
    taken: list[int] = []

    def together() -> None:
        before = scan.layers
        selector.select(pages, 0, rows, k, *asked, scale)
        taken.append(scan.layers - before)

    def alone() -> None:
        share = scan.start(job, native.Claims(tasks))
        share.wait()
        taken.append(share.layers)

    for path, work in (("native + device", together), ("device", alone)):
        seconds = median_seconds(work)
        done = token_heads * (taken[-1] / layout.num_layers if path == "device" else 1)
        yield {
            "what": "select",
            "where": where,
            "path": path,
            "bits": index.bits,
            "query_rows": asked[0].shape[1] * 4,
            "threads": threads,
            "seconds": seconds,
            "layers_on_device": taken[-1],
            "token_heads_per_second": done / seconds,
            "bytes_per_second": done * index.bytes_per_row / seconds,
        }
    selector.close()


def plans(pool: HostPool, threads: int) -> Iterator[Result]:
    """An update at a block's end: the budget is a twentieth, about a third of it changes."""
    layout = pool.layout
    shape = (layout.num_layers, layout.num_kv_heads)
    prefix = pool.num_pages * PAGE
    slots = max(3 * BLOCK, prefix // 20)
    first, last, upto = 4, prefix - 2 * BLOCK, prefix - BLOCK
    k = slots - first - 2 * BLOCK
    rng = np.random.default_rng(0)
    chosen = np.empty((2, *shape, k), dtype=np.int32)
    for at in np.ndindex(shape):
        order = first + rng.permutation(last - first)
        chosen[(0, *at)] = np.sort(order[:k])
        chosen[(1, *at)] = np.sort(order[k // 3 : k // 3 + k])
    pages = np.arange(pool.num_pages, dtype=np.int32)
    geometry = SlotGeometry(3 * slots, 0, slots, slots)
    empty = np.full((*shape, slots), -1, dtype=np.int32)
    index = KeyIndex(pool, 16)
    backends = ["numba"] if find_native().module is None else ["native", "numba"]
    for backend in backends:
        # With 16 bits numba scans; the plan is made by the extension all the same.
        selector = Selector(pool, index, "max", threads, "auto" if backend == "native" else "numba")
        span = (first, last, upto, pages, BLOCK, False, geometry)
        held = selector.plan_update(empty, 0, chosen[0], *span).positions
        seconds = median_seconds(lambda: selector.plan_update(held, slots, chosen[1], *span))  # noqa: B023
        moved = selector.plan_update(held, slots, chosen[1], *span).arrivals
        selector.close()
        yield {"what": "plan_update", "path": backend, "threads": threads, "seconds": seconds, "rows": moved}


def appends(pool: HostPool, bits: int, threads: int) -> Iterator[Result]:
    layout = pool.layout
    rows = torch.randn(layout.num_layers, layout.num_kv_heads, BLOCK, 2 * HEAD_DIM).bfloat16()
    pages = np.arange(pool.num_pages, dtype=np.int32)
    backends = ["numba"] if find_native().module is None else ["native", "numba"]
    for backend in backends:
        common = {"path": backend, "bits": bits, "threads": threads}
        index = KeyIndex(pool, bits, threads, backend)  # type: ignore[arg-type]
        with index, ThreadPoolExecutor(threads) as executor:
            index.append_block(0, 0, BLOCK)
            seconds = median_seconds(lambda: index.append_block(0, BLOCK, BLOCK))  # noqa: B023
            yield {"what": "append_block", **common, "seconds": seconds}
            span = (pages, 0, pool.num_pages * PAGE)
            seconds = median_seconds(lambda: index.append_span(*span, executor=executor))  # noqa: B023
            yield {"what": "append_span", **common, "seconds": seconds}
    seconds = median_seconds(lambda: pool.write_block(0, BLOCK, rows))
    yield {"what": "write_block", "path": "torch", "threads": torch.get_num_threads(), "seconds": seconds}


def measure(tiny: bool) -> Iterator[Result]:
    cores = usable_cores()
    threads = sorted({min(count, cores) for count in (8, 14, 16, cores)})
    sizes = {"in cache": (2, 8, 512) if tiny else (1, 2 * cores, 4096)}
    sizes["memory"] = (2, 8, 2048) if tiny else (36, 8, 32768)
    for where, size in sizes.items():
        with make_pool(*size) as pool:
            for bits in (8, 4, 1):
                pin = torch.cuda.is_available()
                with KeyIndex(pool, bits, pin=pin) as index:  # type: ignore[arg-type]
                    index.append_span(np.arange(pool.num_pages, dtype=np.int32), 0, pool.num_pages * PAGE)
                    if bits == 8:
                        rate = read_bandwidth(index, threads[-1])
                        yield {"what": "read", "where": where, "bytes_per_second": rate}
                    yield from scans(pool, index, where, threads, tiny)
            if where == "memory":
                yield from plans(pool, threads[-1])
                yield from appends(pool, 8, threads[-1])

"""The sections of `bench_interference`: which variants are tried, in which order."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bench_longctx.transfer import host_pool, variants
from bench_longctx.transfer.denoising_step import DenoisingStep
from bench_longctx.transfer.interference import ROW_BYTES, Bench, MakeMover
from bench_longctx.transfer.report import SECTIONS, Result
from bench_longctx.transfer.sm_partition import GreenContext, cublas_sms, torch_carveout
from herald.transfer import GatherKernel, RowMove, ZeroCopyTransfer
from herald.transfer.zero_copy import LAUNCH_BYTES
from herald_kernels import copy_rows

PROBE_SECONDS = 60


def probe(bench: Bench) -> None:
    """Check every shape of the bulk kernel on a small pool.

    Raises:
        TransferCorrupted, RuntimeError: what it moved is wrong, or it does not run.
    """
    bench.open()
    for kernel in kernels().values():
        for blocks in (1, 3):
            if kernel.name == "bulk":
                bench.verify(lambda moves, k=kernel, b=blocks: bench.gather(k, b, moves=moves)())


def run_probe(bench: Bench) -> None:
    """`probe` in a process of its own: a kernel that hangs or faults takes only that along."""
    command = [sys.executable, "-m", "bench_longctx.transfer.bench_interference", "--tiny", "--probe"]
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PROBE_SECONDS
        )
        problem = "" if result.returncode == 0 else result.stdout.strip()[-300:] or "died"
    except subprocess.TimeoutExpired:
        problem = f"does not end within {PROBE_SECONDS} s"
    if problem:
        bench.broken["bulk"] = problem
    bench.keep({"section": "probe", "what": "bulk", **({"error": problem} if problem else {"ok": True})})


def run_pool(bench: Bench) -> None:
    num_bytes = (64 << 20) if bench.tiny else (16 << 30)
    bench.guard("pool", "ready", lambda: host_pool.slabs(num_bytes, bench.cuda))
    bench.guard("pool", "part", lambda: host_pool.parts(num_bytes, bench.cuda))


def kernels() -> dict[str, GatherKernel]:
    """Every kernel and shape of the sweep, best guesses first."""
    shapes = {"registers": variants.registers()}
    for kib in reversed(variants.SHARED_KIB):
        shapes[f"bulk {kib}K"] = variants.bulk(kib, ROW_BYTES)
    shapes["bulk 200K, 1 warp"] = variants.bulk(200, ROW_BYTES, warps=1)
    shapes["bulk 200K, 8 warps"] = variants.bulk(200, ROW_BYTES, warps=8)
    return shapes


def run_alone(bench: Bench) -> None:
    if not bench.cuda:
        bench.guard("alone", "check", lambda: bench.verify(bench.thread) or {"ok": True})
        bench.guard("alone", "thread", lambda: bench.rate(bench.thread))
        return
    bench.guard("alone", "copy engine", lambda: bench.rate(bench.copies))
    for name, kernel in kernels().items():

        def sweep(kernel: GatherKernel = kernel) -> Iterator[Result]:
            bench.verify(lambda moves: bench.gather(kernel, 3, moves=moves)())
            for blocks in (1, 2, 4, 8):
                for rows, moves in (("difference", bench.moves), ("sorted", [bench.sorted])):
                    if blocks == 8 and rows == "sorted":
                        continue
                    for result in bench.rate(bench.gather(kernel, blocks, moves=moves)):
                        yield {"blocks": blocks, "rows": rows, **result}

        bench.guard("alone", name, sweep)
    for threads in (4, 8, 16):
        for packer in ("native", "numba"):
            what = f"staged {packer}, {threads} threads"
            bench.guard("alone", what, lambda t=threads, p=packer: bench.rate(bench.staged(t, p)))
    bench.guard("alone", "submit", lambda: submit_cost(bench))


def submit_cost(bench: Bench) -> Iterator[Result]:
    """Microseconds that `submit` keeps its caller."""
    with ZeroCopyTransfer(bench.pool, bench.arena) as transfer:
        for n, launch_bytes in (
            (100, LAUNCH_BYTES),
            (len(bench.moves[0]), LAUNCH_BYTES),
            (len(bench.moves[0]), 0),
        ):
            transfer.launch_bytes = launch_bytes
            ids = [ids[:n] for ids in (bench.moves[0].src_rows, bench.moves[0].dst_rows)]
            times = []
            for _ in range(30):
                move = RowMove(ids[0], ids[1], ids[1])
                start = time.perf_counter()
                ticket = transfer.submit(move)
                times.append(time.perf_counter() - start)
                ticket.wait_host()
            yield {
                "rows_moved": n,
                "launch_bytes": launch_bytes,
                "submit_us": round(statistics.median(times) * 1e6, 1),
            }


def movers_beside(bench: Bench) -> dict[str, MakeMover]:
    """The ways that are tried beside a step, most wanted first."""
    if not bench.cuda:
        return {"thread": bench.thread}
    largest = variants.bulk(200, ROW_BYTES)
    small = variants.bulk(32, ROW_BYTES)
    ways: dict[str, MakeMover] = {"zero_copy as it is": bench.zero_copy, "copy engine": bench.copies}
    for blocks in (1, 2, 4):
        ways[f"registers, {blocks} blocks"] = bench.gather(variants.registers(), blocks)
    for blocks in (1, 2):
        for kib in reversed(variants.SHARED_KIB):
            ways[f"bulk {kib}K, {blocks} blocks"] = bench.gather(variants.bulk(kib, ROW_BYTES), blocks)
    ways["bulk 32K, 4 blocks"] = bench.gather(small, 4)
    for packer in ("native", "numba"):
        for threads in (8, 16):
            ways[f"staged {packer}, {threads} threads"] = bench.staged(threads, packer)
    for chunk in (1 << 20, 256 << 10):
        ways[f"bulk 200K, 1 blocks, launches of {chunk >> 10} KiB"] = bench.gather(largest, 1, chunk)
    ways["bulk 200K, 4 blocks, launches of 1024 KiB"] = bench.gather(largest, 4, 1 << 20)
    return ways


def run_beside_steps(bench: Bench) -> None:
    for requests in bench.requests:
        step = bench.step(requests)
        bench.guard(
            "beside",
            "nothing",
            lambda s=step: {"requests": s.requests, "step_ms": round(bench.alone(s) * 1e3, 3)},
        )
        for what, make in movers_beside(bench).items():
            bench.guard("beside", what, lambda s=step, m=make: bench.beside(s, m))
        bench.guard("beside", "nothing, again", lambda s=step: again(bench, s))
    if bench.cuda:
        run_low_priority(bench)


def again(bench: Bench, step: DenoisingStep) -> Result:
    """A step alone after everything else: how far the clocks have drifted."""
    return {"requests": step.requests, "step_ms": round(step.seconds(bench.count(step.requests)) * 1e3, 3)}


def run_low_priority(bench: Bench) -> None:
    """The gather's stream below the compute stream: its blocks get what no waiting GEMM takes."""
    largest, small = variants.bulk(200, ROW_BYTES), variants.bulk(32, ROW_BYTES)
    for requests in bench.requests:
        step = bench.step(requests, torch.cuda.Stream(priority=-1))
        for name, kernel, blocks, chunk in (
            ("bulk 200K, 1 blocks", largest, 1, 0),
            ("bulk 200K, 1 blocks, launches of 1024 KiB", largest, 1, 1 << 20),
            ("bulk 200K, 4 blocks, launches of 256 KiB", largest, 4, 256 << 10),
            ("bulk 32K, 4 blocks, launches of 256 KiB", small, 4, 256 << 10),
        ):
            low = torch.cuda.Stream(priority=0)
            make = bench.gather(kernel, blocks, chunk, low)
            bench.guard("beside", f"{name}, low priority", lambda s=step, m=make: bench.beside(s, m))


def partitions() -> dict[str, tuple[Callable[[], Any], AbstractContextManager[None]]]:
    """Name: (makes the stream to capture on, None for any; what holds while capturing)."""

    def none() -> None:
        return None

    def green(sms: int, fine: bool) -> Callable[[], Any]:
        return lambda: GreenContext(sms, fine).stream()

    ways: dict[str, tuple[Callable[[], Any], AbstractContextManager[None]]] = {}
    for sms in (131, 130, 128):
        ways[f"cublasSetSmCountTarget({sms})"] = (none, cublas_sms(sms))
    for sms in (130, 128):
        ways[f"green context of {sms}, fine"] = (green(sms, True), nullcontext())
        ways[f"green context of {sms}, fine, cuBLAS told"] = (green(sms, True), cublas_sms(sms))
    ways["green context of 124"] = (green(124, False), nullcontext())
    ways["green context of 124, cuBLAS told"] = (green(124, False), cublas_sms(124))
    ways["cublaslt"] = (none, torch_carveout(None, "cublaslt"))
    for library in ("cublas", "cublaslt"):
        ways[f"torch carveout 2, {library}"] = (none, torch_carveout(2, library))
    return ways


def run_partition(bench: Bench) -> None:
    if not bench.cuda:
        bench.keep({"section": "partition", "what": "all", "error": "left out: no CUDA device"})
        return
    total = torch.cuda.get_device_properties(0).multi_processor_count
    bench.keep({"section": "partition", "what": "device", "sms": total})
    kernel = variants.registers() if "bulk" in bench.broken else variants.bulk(200, ROW_BYTES)
    for requests in bench.requests:
        bench.alone(bench.step(requests))
    for what, (make_stream, held) in partitions().items():

        def measure(make_stream: Callable[[], Any] = make_stream, held: Any = held) -> Iterator[Result]:
            with held:
                stream = make_stream()
                steps = [bench.step(requests, stream) for requests in bench.requests]
            for step in steps:
                own = step.seconds(bench.count(step.requests) // 2)
                found = bench.beside(step, bench.gather(kernel, 1), own)
                on_it = step.replay_stream is step.stream
                yield {"mover": f"{kernel.name}, 1 block", "replayed_on_it": on_it, **found}

        bench.guard("partition", what, measure)
    bench.guard("partition", "green context of 124: SMs", lambda: {"sms": GreenContext(124).sms})
    bench.guard("partition", "green context of 130, fine: SMs", lambda: {"sms": GreenContext(130, True).sms})
    bench.guard("partition", "Triton in a green context", lambda: triton_in_green(bench))


def triton_in_green(bench: Bench) -> Result:
    """Whether a Triton kernel, loaded into the primary context, runs on a green context's stream."""
    rows = torch.arange(1000, device=bench.device)
    src = torch.randn(1000, 64, device=bench.device)
    dst = torch.zeros_like(src)
    copy_rows(dst, rows, src, rows)
    dst.zero_()
    torch.cuda.synchronize()
    stream = GreenContext(124).stream()
    with torch.cuda.stream(stream):
        copy_rows(dst, rows, src, rows)
    torch.cuda.synchronize()
    return {"ok": torch.equal(dst, src)}


RUN = dict(zip(SECTIONS, (run_pool, run_alone, run_beside_steps, run_partition), strict=True))

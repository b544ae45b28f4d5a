"""What the sections of `bench_interference` share: the rows, the guard around a variant, the measurements."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench_longctx import machine, output
from bench_longctx.transfer import variants
from bench_longctx.transfer.beside import run_beside
from bench_longctx.transfer.denoising_step import TINY, DenoisingStep, StepShape, Weights
from bench_longctx.transfer.movers import CopyMover, GatherMover, Mover, TransferMover
from bench_longctx.transfer.report import Result, line
from herald.errors import HeraldError
from herald.kvstore import HostSlab
from herald.transfer import (
    GatherKernel,
    RowMove,
    StagedTransfer,
    ThreadTransfer,
    ZeroCopyTransfer,
    verify_rows,
)

ROW_BYTES = 512
MakeMover = Callable[[], Mover]


class Bench:
    """Pool, arena, moves and weights; runs variants and keeps what they say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.perf_counter()
        self.cuda = torch.cuda.is_available()
        self.tiny = options.tiny or not self.cuda
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.results: list[Result] = []
        self.requests = options.requests[:1] if not self.cuda else options.requests
        # in fewer, Python's threads may not take turns once
        self.steps = 64 if self.tiny else 0
        self.broken: dict[str, str] = {}
        self._alone: dict[int, float] = {}

    def open(self) -> None:
        """Allocate what the sections after `pool` share."""
        rng = np.random.default_rng(0)
        self.slab = HostSlab((64 << 20) if self.tiny else (8 << 30), pin=self.cuda)
        if self.cuda and not self.slab.pinned:
            raise HeraldError(
                f"the pool is not page-locked ({self.slab.pin_reason})", "allow more locked memory"
            )
        words = self.slab.tensor(torch.int64, (self.slab.num_bytes // 8,))
        torch.arange(len(words), out=words)
        self.pool = words.view(-1, ROW_BYTES // 8)
        layers, heads, positions = (4, 2, 2048) if self.tiny else (36, 8, 32768)
        arrivals = round(0.016 * positions)
        room = len(self.pool) - layers * heads * positions
        self.moves = [
            variants.difference_move(rng, first, layers, heads, positions, arrivals)
            for first in (0, room // 2, room)
        ]
        self.sorted = variants.sorted_move(rng, len(self.pool), 1000 if self.tiny else 1 << 19)
        self.arena = torch.zeros(
            max(len(self.sorted), len(self.moves[0])) + 7,
            ROW_BYTES // 8,
            dtype=torch.int64,
            device=self.device,
        )
        self.check = variants.scattered_move(
            rng, len(self.pool), len(self.arena), min(65_521, len(self.arena) - 7)
        )
        self.weights = Weights(TINY if self.tiny else StepShape(), self.device)

    def guard(self, section: str, what: str, work: Callable[[], Iterator[Result] | Result]) -> None:
        """Run a variant, keep its results, and go on whatever happens."""
        if time.perf_counter() - self.started > self.options.seconds:
            self.keep({"section": section, "what": what, "error": "left out: no time"})
            return
        try:
            made = work()
            for result in [made] if isinstance(made, dict) else made:
                self.keep({"section": section, "what": what, **result})
        except Exception as error:
            self.keep({"section": section, "what": what, "error": f"{type(error).__name__}: {error}"[:300]})

    def keep(self, result: Result) -> None:
        self.results.append(result)
        print(line(result), flush=True)

    def write(self) -> None:
        report = {
            "machine": machine.describe(),
            "tiny": self.tiny,
            "seconds": round(time.perf_counter() - self.started, 1),
            "results": self.results,
        }
        output.write_report(self.options.json, report)

    def rate(self, make: MakeMover) -> Iterator[Result]:
        """GB/s of loads with the device idle, by their own times."""
        mover = make()
        try:
            seconds = []
            for _ in range(5):
                ticket = mover.start()
                ticket.wait_host()
                assert ticket.seconds is not None
                seconds.append(ticket.seconds)
            yield {"gb_per_s": round(ticket.bytes / statistics.median(seconds[1:]) / 1e9, 2)}
        finally:
            mover.close()

    def verify(self, mover_of: Callable[[Sequence[RowMove]], Mover]) -> None:
        """Move scattered rows to scattered places; every one must arrive, and nothing else change."""
        self.arena.fill_(-1)
        if self.cuda:
            torch.cuda.synchronize()
        mover = mover_of([self.check])
        try:
            mover.start().wait_host()
        finally:
            mover.close()
        verify_rows(self.check, self.pool, self.arena)
        untouched = torch.ones(len(self.arena), dtype=torch.bool, device=self.device)
        untouched[torch.from_numpy(self.check.dst_rows).to(self.device)] = False
        if not bool((self.arena[untouched] == -1).all()):
            raise RuntimeError("rows were written that nobody asked for")

    def step(self, requests: int, stream: Any = None) -> DenoisingStep:
        return DenoisingStep(self.weights, requests, stream)

    def count(self, requests: int) -> int:
        """Steps that take about a quarter of a second."""
        return self.steps or {1: 56, 8: 34}.get(requests, 18)

    def alone(self, step: DenoisingStep) -> float:
        """Seconds of a whole-device step with nothing beside it."""
        if step.requests not in self._alone:
            self._alone[step.requests] = step.seconds(self.count(step.requests))
        return self._alone[step.requests]

    def beside(self, step: DenoisingStep, make: MakeMover, own: float | None = None) -> Result:
        """A mover beside a step.

        Args:
            own: seconds of this step with nothing beside it, where it is not the whole-device one.
        """
        alone = self.alone(step) if own is None else own
        mover = make()
        try:
            found = run_beside(step, self.count(step.requests), alone, mover)
        finally:
            mover.close()
        result: Result = {
            "requests": step.requests,
            "gb_per_s": round(found.gb_per_second, 2),
            "step_ms": round(found.step_seconds * 1e3, 3),
            "slowdown_percent": round(found.slowdown * 100, 1),
        }
        if found.seconds_per_gb is None:
            result["left_out"] = "no row arrived meanwhile"
        else:
            result["ms_per_gb"] = round(found.seconds_per_gb * 1e3, 2)
        if own is not None and step.requests in self._alone:
            whole = self._alone[step.requests]
            result["own_percent"] = round((own / whole - 1) * 100, 1)
        return result

    def gather(
        self,
        kernel: GatherKernel,
        blocks: int,
        chunk_bytes: int = 0,
        stream: Any = None,
        moves: Sequence[RowMove] | None = None,
    ) -> MakeMover:
        rows = self.moves if moves is None else moves

        def make() -> Mover:
            if kernel.name in self.broken:
                raise RuntimeError(f"the {kernel.name} kernel failed its probe")
            return GatherMover(self.pool, self.arena, rows, kernel, blocks, chunk_bytes, stream)

        return make

    def zero_copy(self) -> Mover:
        """The transfer of the engine, its ids uploaded with each move."""
        return TransferMover(ZeroCopyTransfer(self.pool, self.arena), self.moves)

    def staged(self, threads: int, packer: str) -> MakeMover:
        def make() -> Mover:
            transfer = StagedTransfer(self.pool, self.arena, num_threads=threads)
            if transfer.packer_name != packer:
                transfer.close()
                raise RuntimeError(f"the packer is {transfer.packer_name}")
            return TransferMover(transfer, self.moves)

        return make

    def copies(self) -> Mover:
        return CopyMover(self.pool, self.arena, len(self.moves[0]) * ROW_BYTES)

    def thread(self, moves: Sequence[RowMove] | None = None) -> Mover:
        return TransferMover(ThreadTransfer(self.pool, self.arena), self.moves if moves is None else moves)

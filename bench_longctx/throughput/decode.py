"""Decoding at a steady state: block times, tokens a second, what retrieval exposes and disturbs."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench_longctx.stepping import step
from herald.engine.blocks import BlockTable
from herald.engine.engine import Engine
from herald.engine.lanes import StepShape
from herald.engine.program import StepProgram
from herald.engine.request import Phase, Request
from herald.engine.resident import SetUpdate
from herald.engine.retriever import Selection
from herald.profile.kernels import record_kernels
from herald.sampling_params import SamplingParams
from herald.select import Plan

WARM_BLOCKS = 3
# Rounds in which a step was recorded do not count; so many more may be needed.
SPARE_BLOCKS = 10
FULL, LANES_ONLY, BARE = "full", "lanes", "bare"


@dataclass(frozen=True)
class Run:
    """One measurement.

    Args:
        prefix: positions of each prompt.
        batch: requests.
        steps: denoising steps T of a block.
        blocks: blocks that are measured, after `WARM_BLOCKS`.
        retrieval: ``"full"``; ``"lanes"``: look-ahead lanes run, nothing is selected or moved; ``"bare"``:
            not even those. (Both keep a frozen set; they say what retrieval costs a block.)
    """

    prefix: int
    batch: int
    steps: int
    blocks: int = 5
    retrieval: str = FULL


def measure(engine: Engine, run: Run) -> dict[str, Any]:
    """Run a batch and return its figures as JSON values; the engine is idle afterwards."""
    block = engine.model.config.block_length
    params = SamplingParams(
        max_tokens=block * (WARM_BLOCKS + run.blocks + SPARE_BLOCKS + 2),
        denoising_steps=run.steps,
        confidence_threshold=None,
        ignore_eos=True,
        seed=0,
    )
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.model.config.mask_token_id, run.prefix // block * block).tolist()
    requests = [engine.add_request(prompt, params) for _ in range(run.batch)]
    while not all(r.phase is Phase.DECODE for r in requests):
        step(engine, requests)
    if engine.retriever is not None:
        _set_retrieval(engine, run.retrieval)
    scan = None if engine.retriever is None else engine.retriever.store.selector.device_scan
    layers = 0 if scan is None else scan.layers
    rounds = _rounds(engine, requests, run.blocks)
    layers = 0 if scan is None else scan.layers - layers
    launches = rounds.launches
    seconds = statistics.median(rounds.seconds)
    exposed, moved, selected, selecting = rounds.sums
    _restore(engine)
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    result: dict[str, Any] = {
        "prefix": run.prefix,
        "batch": run.batch,
        "steps": run.steps,
        "retrieval": run.retrieval,
        "block_seconds": seconds,
        "block_seconds_all": rounds.seconds,
        "tokens_per_second": run.batch * block / seconds,
        "exposed_share": exposed / (run.batch * sum(rounds.seconds)),
        "selection_seconds": selecting / max(rounds.selections, 1),
        "device_layers": layers,
        "rows_moved_share": moved / selected if selected else 0.0,
        "launch_wall_us": 1e6 * statistics.median(wall for wall, _, _ in launches),
        "launch_cpu_us": 1e6 * statistics.median(cpu for _, cpu, _ in launches),
        "launch_cpu_us_mean": 1e6 * statistics.mean(cpu for _, cpu, _ in launches),
        "run_cpu_us": 1e6 * statistics.median(run for _, _, run in launches),
        "rounds_left_out": rounds.left_out,
    }
    if engine.model.device.type == "cuda":
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return result


def busy_share(engine: Engine, run: Run, steps: int = 40) -> dict[str, Any]:
    """Share of the wall time in which a kernel ran, and launches a step, over ``steps`` steps."""
    params = SamplingParams(
        max_tokens=engine.model.config.block_length * 12,
        denoising_steps=run.steps,
        confidence_threshold=None,
        ignore_eos=True,
        seed=0,
    )
    prompt = [1] * (run.prefix // engine.model.config.block_length * engine.model.config.block_length)
    requests = [engine.add_request(prompt, params) for _ in range(run.batch)]
    while min(r.counters.blocks for r in requests) < WARM_BLOCKS:
        step(engine, requests)
    launches = _time_launches(engine)

    def work() -> None:
        while len(launches) < steps:
            step(engine, requests)

    times = record_kernels(work)
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    _restore(engine)
    return {"busy_share": times.busy_share, "kernels_a_step": times.count / steps}


@dataclass
class _Rounds:
    """Rounds, in each of which every request finished one more block."""

    seconds: list[float]
    sums: tuple[float, ...]
    selections: int
    launches: list[tuple[float, float, float]]
    left_out: int


def _rounds(engine: Engine, requests: list[Request], wanted: int) -> _Rounds:
    """Run rounds until ``wanted`` of them saw no step recorded, after `WARM_BLOCKS`."""
    launches = _time_launches(engine)
    done, end = 0, time.perf_counter()
    recorded, sums = len(engine.runner.programs), _sums(requests)
    found = _Rounds([], (0.0,) * 4, 0, [], 0)
    while len(found.seconds) < wanted and done < WARM_BLOCKS + wanted + SPARE_BLOCKS:
        step(engine, requests)
        if min(r.counters.blocks for r in requests) <= done:
            continue
        done += 1
        now, before, start = time.perf_counter(), sums, end
        end, sums = now, _sums(requests)
        if done == WARM_BLOCKS and engine.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if done > WARM_BLOCKS and len(engine.runner.programs) == recorded:
            found.seconds.append(now - start)
            parts = zip(found.sums, sums, before, strict=True)
            found.sums = tuple(total + new - old for total, new, old in parts)
            found.selections += len(requests)
            found.launches += launches
        else:
            found.left_out += 1
        launches.clear()
        recorded = len(engine.runner.programs)
    return found


def _sums(requests: list[Request]) -> tuple[float, ...]:
    """(exposed seconds, rows moved, rows selected, seconds of selection) of all requests."""
    counters = [r.counters for r in requests]
    return (
        sum(c.exposed_seconds for c in counters),
        float(sum(c.rows_moved for c in counters)),
        float(sum(c.rows_selected for c in counters)),
        sum(c.selection_seconds for c in counters),
    )


def _time_launches(engine: Engine) -> list[tuple[float, float, float]]:
    """Have each `Decoder.launch` note its seconds in the list that is returned.

    They are wall time, CPU time of the thread, and CPU time of `StepProgram.run` in it.
    """
    found: list[tuple[float, float, float]] = []
    launch, program = engine.decoder.launch, engine.runner.program
    run_seconds = 0.0

    def timed_program(table: BlockTable, shape: StepShape) -> StepProgram:
        made = program(table, shape)
        if "run" not in vars(made):
            run = made.run

            def timed_run(inputs: torch.Tensor | None) -> None:
                nonlocal run_seconds
                start = time.thread_time()
                run(inputs)
                run_seconds = time.thread_time() - start

            made.run = timed_run  # type: ignore[method-assign]
        return made

    def timed(requests: list[Request], batch: int) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        launch(requests, batch)
        found.append((time.perf_counter() - wall, time.thread_time() - cpu, run_seconds))

    engine.decoder.launch = timed  # type: ignore[method-assign]
    engine.runner.program = timed_program  # type: ignore[method-assign]
    return found


def _set_retrieval(engine: Engine, retrieval: str) -> None:
    """Freeze the sets, for the two ways to run without retrieval."""
    if retrieval == FULL:
        return
    retriever, planner = engine.retriever, engine.decoder.planner
    assert retriever is not None

    def frozen(request: Request, block: int) -> Selection:
        resident = request.resident
        assert resident is not None
        size = resident.size_for(block * request.block_length)
        geometry = resident.geometry
        version, _, positions = resident.snapshot()
        heads = np.arange(positions.shape[0] * positions.shape[1], dtype=np.int64)[:, None]
        slots = np.arange(size - request.block_length, size, dtype=np.int64)
        free = (heads * geometry.capacity + geometry.row_start + slots).reshape(-1)
        none = np.empty(0, dtype=np.int64)
        counts = np.zeros(positions.shape[:2], dtype=np.int32)
        plan = Plan(none, none, none, counts, free, positions)
        chosen: Future[np.ndarray] = Future()
        update: Future[SetUpdate] = Future()
        arrival: Future[None] = Future()
        chosen.set_result(none)
        update.set_result(SetUpdate(version, plan, None))
        arrival.set_result(None)
        return Selection(
            block * request.block_length, block, chosen, update, arrival, True, threading.Event()
        )

    def select(request: Request, queries: Any, lse: Any, block: int, due: bool, after: Any) -> Selection:
        return frozen(request, block)

    retriever.select = select  # type: ignore[method-assign]
    if retrieval == BARE:
        retriever.store_block = lambda request, rows, prefix, after: None  # type: ignore[method-assign]
        planner.looks_ahead = lambda request: False  # type: ignore[method-assign]

        def begin(request: Request, prefix: int) -> bool:
            request.selection = frozen(request, prefix // request.block_length)
            return False

        planner.selects_at_boundary = begin  # type: ignore[method-assign]


def _restore(engine: Engine) -> None:
    for program in engine.runner.programs:
        vars(program).pop("run", None)
    for owner, names in (
        (engine.runner, ("program",)),
        (engine.decoder, ("launch",)),
        (engine.decoder.planner, ("looks_ahead", "selects_at_boundary")),
        (engine.retriever, ("select", "store_block")),
    ):
        for name in names:
            if owner is not None and name in vars(owner):
                delattr(owner, name)

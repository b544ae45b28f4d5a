"""Short ways through the step loop give what the long ones give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from herald.config import OffloadConfig
from herald.engine import engine as engine_module
from herald.engine import planner, resident
from herald.engine.blocks import BlockTable
from herald.engine.decoder import MAX_AHEAD, MAX_UNDER_WAY, Decoder
from herald.engine.engine import Engine
from herald.engine.lanes import StepPlan
from herald.engine.plain_step import PlainStep
from herald.engine.planner import Part, StepPlanner
from herald.engine.program import StepProgram
from herald.engine.reports import StepReport
from herald.engine.request import Phase, Request
from herald.engine.resident import Arrived
from herald.errors import RetrievalFailed, TransferCorrupted
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import check_resident_rows, leaks, random_prompt, run, tokens

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=56, ignore_eos=True, confidence_threshold=None, denoising_steps=8)


class FreshPlans:
    """Plans anew whatever is taken from the step before, and compares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lanes = self.repeats = self.kept_inputs = 0
        self.numbers: dict[StepProgram, list[int]] = {}
        plain, repeat, begin, run = (
            StepPlanner._plan_plain,
            Decoder._repeat,
            StepReport.begin,
            StepProgram.run,
        )
        given: list[int] = []

        def plan_plain(planner: StepPlanner, request: Request, table: BlockTable, plan: StepPlan) -> Part:
            fresh, part = self.fresh(planner, [request], table)
            lanes, blocks = len(plan._lanes), len(plan._blocks)
            found = plain(planner, request, table, plan)
            assert plan._lanes[lanes:] == fresh._lanes and plan._blocks[blocks + 1 :] == fresh._blocks[1:]
            assert [found] == part and not fresh.final_lane and not fresh.capture_lane
            self.lanes += 1
            return found

        def again(decoder: Decoder, step: PlainStep) -> None:
            table, shape = step.program.table, step.program.shape
            fresh, parts = self.fresh(decoder.planner, step.requests, table)
            repeat(decoder, step)
            packed = fresh.pack(shape, table.masks_row, table.spare).tolist()
            assert packed == step.numbers.tolist() == step.program.inputs.tolist()
            assert decoder.under_way[-1].parts == parts
            self.repeats += 1

        def take(report: StepReport, numbers: np.ndarray, *rows) -> None:
            given[:] = numbers.tolist()
            begin(report, numbers, *rows)

        def run_with(program: StepProgram, inputs: torch.Tensor | None) -> None:
            run(program, inputs)
            self.kept_inputs += inputs is None
            if inputs is not None:
                self.numbers[program] = list(given)
            assert program.inputs[: len(self.numbers[program])].tolist() == self.numbers[program]

        monkeypatch.setattr(StepPlanner, "_plan_plain", plan_plain)
        monkeypatch.setattr(Decoder, "_repeat", again)
        monkeypatch.setattr(StepReport, "begin", take)
        monkeypatch.setattr(StepProgram, "run", run_with)

    def fresh(
        self, planner: StepPlanner, requests: list[Request], table: BlockTable
    ) -> tuple[StepPlan, list[Part]]:
        """The whole plan of a step, which leaves no trace."""
        plan, parts = StepPlan(), []
        for request in requests:
            before = copy(vars(request))
            parts.append(planner._plan_request(request, table, plan, may_look=True))
            vars(request).update(before)
        return plan, parts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_short_plans_equal_fresh_ones(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, offload: OffloadConfig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    fresh = FreshPlans(monkeypatch)
    engine = make_engine("sdar_b8", offload, max_num_seqs=3)
    requests: list[Request] = []
    for number in range(9):
        block = [8, 4][int(rng.random() < 0.3)]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 80)),
            ignore_eos=True,
            confidence_threshold=[None, 0.02][int(rng.random() < 0.2)],
            denoising_steps=int(rng.integers(2, block + 1)),
            temperature=float(rng.random() < 0.15),
            block_length=block,
            seed=number,
        )
        requests.append(engine.add_request(random_prompt(int(rng.integers(3, 200)), number), params))
        for _ in range(int(rng.integers(0, 25))):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(requests[int(rng.integers(0, number + 1))].request_id)
    while engine.has_work:
        engine.step()
    assert fresh.lanes > 5 and fresh.repeats > 5 and fresh.kept_inputs > 0


class Behind:
    """A device whose steps take ``seconds``, and end when the host waits for one that comes after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine, seconds: float) -> None:
        self.most: dict[bool, int] = {False: 0, True: 0}
        steps = engine.decoder.under_way
        done: set[int] = set()
        end, launch = StepReport.end, engine.decoder.launch

        def start(report: StepReport, rows: torch.Tensor | None, count: int) -> None:
            done.discard(id(report))
            end(report, rows, count)

        def wait(report: StepReport) -> None:
            for step in steps:
                done.add(id(step.report))
                if step.report is report:
                    return

        def watch(requests: list[Request], batch: int) -> None:
            launch(requests, batch)
            plain = all(step.goes_on for step in list(steps)[:-1])
            self.most[plain] = max(self.most[plain], len(steps))

        monkeypatch.setattr(StepReport, "end", start)
        monkeypatch.setattr(StepReport, "done", lambda report: id(report) in done)
        monkeypatch.setattr(StepReport, "wait", wait)
        monkeypatch.setattr(StepReport, "span", lambda report: (1.0, 1.0 + seconds))
        engine.decoder.launch = watch  # type: ignore[method-assign]


@pytest.mark.parametrize("seconds, most", [(0.001, MAX_AHEAD), (0.0075, 3), (0.02, MAX_UNDER_WAY)])
def test_short_steps_that_only_denoise_run_ahead(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    prompts = [random_prompt(n, n) for n in (90, 170)]
    expected = tokens(run(make_engine("sdar_b8", SPARSE), prompts, PARAMS))
    engine = make_engine("sdar_b8", SPARSE)
    behind = Behind(monkeypatch, engine, seconds)
    assert tokens(run(engine, prompts, PARAMS)) == expected
    assert behind.most == {False: MAX_UNDER_WAY, True: most}


def test_nobody_runs_ahead_of_others(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a request waits for its turn, and not beside another block length."""
    for limit, blocks in ((1, (8, 8)), (2, (8, 4))):
        engine = make_engine("sdar_b8", SPARSE, max_num_seqs=limit)
        with monkeypatch.context() as patches:
            behind = Behind(patches, engine, 0.001)
            requests = [
                engine.add_request(
                    random_prompt(90, n), SamplingParams(**{**vars(PARAMS), "block_length": n})
                )
                for n in blocks
            ]
            while requests[0].phase is not Phase.FINISHED:
                engine.step()
            assert max(behind.most.values()) <= MAX_UNDER_WAY
            while engine.has_work:
                engine.step()


def test_no_room_for_copies_ends_the_requests_they_were_for(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("sdar_b8", SPARSE)
    prompts = [random_prompt(90, 1), random_prompt(170, 2)]
    expected = tokens(run(engine, prompts, PARAMS))
    requests = [engine.add_request(prompt, PARAMS) for prompt in prompts]
    while requests[0].counters.blocks < 2:
        engine.step()
    clone, calls = torch.Tensor.clone, []

    def full(rows: torch.Tensor, *args, **options) -> torch.Tensor:
        calls.append(rows.shape)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return clone(rows, *args, **options)

    with monkeypatch.context() as patches:
        patches.setattr(torch.Tensor, "clone", full)
        while not calls:
            engine.step()
    while engine.has_work:
        engine.step()
    failed = [request for request in requests if request.error is not None]
    assert failed and all(isinstance(request.error, RetrievalFailed) for request in failed)
    for request, wanted in zip(requests, expected, strict=True):
        assert request.error is not None or list(request.output_ids) == wanted
    assert tokens(run(engine, prompts, PARAMS)) == expected


def test_rows_that_are_not_given_are_skipped() -> None:
    """A report's memory is used again: what a step with more final lanes left there is gone."""
    report = StepReport(torch.device("cpu"), None)
    numbers = np.arange(5)
    for kept in (0, 2, 1, 0, 2):
        rows = [np.full(3, 10 + lane) for lane in range(kept)]
        report.begin(numbers + kept, rows, 6)
        assert report.inputs[:5].tolist() == (numbers + kept).tolist()
        assert report.inputs[5:].tolist() == [10] * 3 * (kept > 0) + [11] * 3 * (kept > 1) + [-1] * (
            6 - 3 * kept
        )


def test_the_models_device_is_current_in_a_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are launched on the device that is current, whichever their tensors are on."""
    current: list[torch.device] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    run_program = StepProgram._run

    def watched(program: StepProgram) -> None:
        assert current == [engine.model.device]
        run_program(program)

    engine = make_engine("sdar_b8", SPARSE)
    monkeypatch.setattr(engine_module, "current_device", noted)
    monkeypatch.setattr(StepProgram, "_run", watched)
    assert tokens(run(engine, [random_prompt(90, 1)], PARAMS)) and not current


def test_rows_of_requests_that_begin_together_go_in_together(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy a step, whatever number of sets it is for, and each row where its set says."""
    engine = make_engine("sdar_b8", SPARSE)
    sets: list[int] = []
    copies: list[int] = []
    put, copy_rows = planner.put_rows, resident.copy_rows

    def putting(arrived: list[Arrived]) -> None:
        sets.append(len(arrived))
        put(arrived)

    def copying(dst: torch.Tensor, dst_rows: torch.Tensor, src: torch.Tensor, src_rows: torch.Tensor) -> None:
        copies.append(dst_rows.numel())
        copy_rows(dst, dst_rows, src, src_rows)

    monkeypatch.setattr(planner, "put_rows", putting)
    monkeypatch.setattr(resident, "copy_rows", copying)
    compared: list[int] = []
    prompts = [random_prompt(length, length) for length in (184, 208, 240, 272, 304)]
    run(
        engine,
        prompts,
        replace(PARAMS, denoising_steps=2),
        lambda live: compared.append(check_resident_rows(engine, live)),
    )
    assert sum(compared) > 1000 and not leaks(engine)
    assert max(sets) > 1
    assert len(copies) == sum(count > 0 for count in sets) and min(copies) > 0


@pytest.mark.parametrize("failing", [0, 2])
def test_rows_of_others_go_in_though_a_requests_are_wrong(make_engine: MakeEngine, failing: int) -> None:
    """A check that fails in a step ends its request; who shares that step's copy has true rows."""
    engine = make_engine("sdar_b8", replace(SPARSE, verify_transfers=True))
    prompts = [random_prompt(length, length) for length in (184, 208, 240)]
    params = replace(PARAMS, denoising_steps=2)
    whole = tokens(run(engine, prompts, params))
    retriever = engine.retriever
    assert retriever is not None
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    verify, wrong, compared = retriever.verify, [], 0

    def failing_once(request: Request, update: resident.SetUpdate) -> None:
        verify(request, update)
        if request is requests[failing] and request.block >= 2 and not wrong:
            wrong.append(request)
            raise TransferCorrupted("planted", "none")

    retriever.verify = failing_once  # type: ignore[method-assign]
    while not all(request.phase is Phase.FINISHED for request in requests):
        engine.step()
        compared += check_resident_rows(engine, [r for r in requests if r.phase is not Phase.FINISHED])
    assert wrong == [requests[failing]] and isinstance(requests[failing].error, TransferCorrupted)
    others = [number for number in range(3) if number != failing]
    assert [list(requests[number].output_ids) for number in others] == [whole[number] for number in others]
    assert compared > 1000 and not leaks(engine)

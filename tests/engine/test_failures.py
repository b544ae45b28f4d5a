"""What fails in a step ends the requests that took part in it, each with its own error, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import OffloadConfig
from herald.engine.canvas.window_step import WindowStep
from herald.engine.engine import Engine
from herald.engine.memory import EngineMemory
from herald.engine.program import StepProgram
from herald.engine.reports import ReportPool, StepReport
from herald.engine.request import Phase, Request
from herald.engine.runner import LaneRunner
from herald.errors import HeraldError, StepFailed
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeCanvas, MakeEngine
from tests.engine.support import leaks, random_prompt, run, tokens

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
PROMPTS = [random_prompt(n, n) for n in (5, 130, 40)]


class NoRoom:
    """A function that finds no room in its n-th call from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls = self.failed = 0
        self.at: int | None = None
        function = getattr(owner, name)

        def limited(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                self.failed += 1
                raise torch.OutOfMemoryError("no room on the device")
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, limited)

    def arm(self, after: int) -> None:
        self.calls, self.at = 0, after


def survive(engine: Engine, no_room: NoRoom, prompts: list[list[int]], params: SamplingParams) -> set[type]:
    """Let calls fail, one after the other, while requests run; the kinds of errors that these met."""
    expected = tokens(run(engine, prompts, params))
    calls, kinds = random.Random(1).sample(range(1, 20), 8), set()
    for after in calls:
        no_room.arm(after)
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while any(request.phase is not Phase.FINISHED for request in requests):
            engine.step()
        for request, right in zip(requests, expected, strict=True):
            if request.error is None:
                assert request.output_ids == right
            else:
                assert isinstance(request.error, HeraldError) and "no room on the device" in str(
                    request.error
                )
                assert isinstance(request.error.__cause__, torch.OutOfMemoryError)
                kinds.add(type(request.error))
    no_room.at = None
    assert tokens(run(engine, prompts, params)) == expected
    assert not leaks(engine)
    tables = engine.decoder._tables.values()
    assert all(len(table._free) == engine.config.max_num_seqs for table in tables)
    return kinds


@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ReportPool, "take"),
        (StepReport, "begin"),
        (StepReport, "end"),
        (StepProgram, "run"),
        (StepProgram, "_decide"),
        (LaneRunner, "program"),
    ],
)
def test_a_step_without_room(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, offload: OffloadConfig, owner: type, name: str
) -> None:
    engine = make_engine("sdar_b8", offload)
    assert StepFailed in survive(engine, NoRoom(monkeypatch, owner, name), PROMPTS, PARAMS)


@pytest.mark.parametrize(("owner", "name"), [(ReportPool, "take"), (StepReport, "end"), (WindowStep, "run")])
def test_a_step_of_a_canvas_without_room(
    make_canvas: MakeCanvas, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    engine = make_canvas("llada", OffloadConfig(kv_budget=0.5, min_resident_rows=16))
    params = replace(PARAMS, cache="dual", block_length=8)
    prompts = [prompt[:40] for prompt in PROMPTS]
    assert StepFailed in survive(engine, NoRoom(monkeypatch, owner, name), prompts, params)


@pytest.mark.parametrize("name", ["ensure_one", "pages_for"])
def test_memory_that_cannot_be_made_ends_its_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = make_engine("sdar_b8", SPARSE)
    expected = tokens(run(engine, PROMPTS, PARAMS))
    no_room = NoRoom(monkeypatch, EngineMemory, name)
    ended: list[Request] = []
    for after in range(1, 8):
        requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        no_room.arm(after)
        while any(request.phase is not Phase.FINISHED for request in requests):
            engine.step()
        ended += [request for request in requests if request.error is not None]
        no_room.at = None
    assert ended and all("it got no memory (no room" in str(request.error) for request in ended)
    assert tokens(run(engine, PROMPTS, PARAMS)) == expected and not leaks(engine)


@pytest.mark.parametrize(("owner", "name"), [(StepProgram, "run"), (LaneRunner, "project")])
def test_a_device_that_is_lost_stops_the_engine(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Where no request can go on, the error is the engine's: who watches it must see that."""

    class Lost:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make_engine("sdar_b8", SPARSE)
    no_room = NoRoom(monkeypatch, owner, name)
    request = engine.add_request(PROMPTS[1], PARAMS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Lost)
    no_room.arm(1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        while request.phase is not Phase.FINISHED:
            engine.step()
    no_room.at = None
    monkeypatch.undo()

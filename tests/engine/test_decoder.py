"""Which steps are launched when, seen from the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from herald.config import OffloadConfig
from herald.engine.decoder import MAX_UNDER_WAY
from herald.engine.engine import Engine
from herald.engine.reports import StepReport
from herald.engine.request import Phase
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import random_prompt, run, tokens

SPARSE = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
STATIC = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
THRESHOLD = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=0.01)


class Lag:
    """A device that is behind: a step is done when somebody waits for it, or asks often enough."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asks: int) -> None:
        self.left: dict[int, int] = {}
        self.most = 0
        end = StepReport.end

        def begin_lag(report: StepReport, rows, count: int) -> None:
            end(report, rows, count)
            self.left[id(report)] = asks

        def done(report: StepReport) -> bool:
            self.left[id(report)] -= 1
            return self.left[id(report)] < 0

        monkeypatch.setattr(StepReport, "end", begin_lag)
        monkeypatch.setattr(StepReport, "done", done)
        monkeypatch.setattr(StepReport, "wait", lambda report: self.left.update({id(report): 0}))

    def watch(self, engine: Engine) -> Callable:
        def each_step(live) -> None:
            self.most = max(self.most, len(engine.decoder.under_way))

        return each_step


@pytest.mark.parametrize("offload", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("params", [STATIC, THRESHOLD], ids=["static", "threshold"])
@pytest.mark.parametrize("asks", [1, 3, 50])
def test_reports_that_come_late_change_no_token(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    offload: OffloadConfig,
    params: SamplingParams,
    asks: int,
) -> None:
    prompts = [random_prompt(n, n) for n in (5, 90, 170)]
    expected = tokens(run(make_engine("sdar_b8", offload), prompts, params))
    lag = Lag(monkeypatch, asks)
    engine = make_engine("sdar_b8", offload)
    assert tokens(run(engine, prompts, params, lag.watch(engine))) == expected
    if params is STATIC:
        assert lag.most >= 1  # a step was launched before the last one was read
    assert lag.most <= MAX_UNDER_WAY


def test_stop_and_eos_with_late_reports(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends while further steps of it are under way ends as it does without them."""
    prompts = [random_prompt(n, n) for n in (40, 90, 150, 170)]
    params = SamplingParams(max_tokens=60, confidence_threshold=None, denoising_steps=4)
    engine = make_engine("sdar_b8", SPARSE)
    expected = run(engine, prompts, params)
    ends = {token for request in expected for token in request.output_ids}
    ids = tuple(sorted(ends)[: len(ends) // 3])  # tokens that do occur end the output
    with_ends = []
    for late in (False, True):
        if late:
            Lag(monkeypatch, 3)
        engine = make_engine("sdar_b8", SPARSE)
        requests = [engine.add_request(p, params) for p in prompts]
        for request in requests:
            request.eos_token_ids = ids
            request.checker._eos = frozenset(ids)
        while any(r.phase is not Phase.FINISHED for r in requests):
            engine.step()
        assert engine.memory.arena.idle or engine.retriever is not None
        with_ends.append([(r.output_ids, r.finish_reason) for r in requests])
    assert with_ends[0] == with_ends[1]
    assert any(reason == "stop" for _, reason in with_ends[0])


def test_a_request_that_selects_leaves_the_others_running(make_engine: MakeEngine) -> None:
    """Steps go on without a request whose rows are not there."""
    engine = make_engine("sdar_b8", OffloadConfig(**{**vars(SPARSE), "lookahead_step": 99}))
    short, long = random_prompt(6, 1), random_prompt(300, 2)
    slow = SamplingParams(max_tokens=16, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
    many = SamplingParams(max_tokens=200, ignore_eos=True, confidence_threshold=None, denoising_steps=8)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.2))
    first = engine.add_request(long, slow)
    second = engine.add_request(short, many)
    progressed = 0
    while first.phase is not Phase.FINISHED:
        before = second.counters.steps
        engine.step()
        if first.selection is not None and not first.selection.ready:
            progressed += second.counters.steps - before
    assert progressed >= 3
    assert first.counters.exposed_seconds > 0.1


def test_block_lengths_take_turns(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that can always run ahead leave those of another block length their steps."""
    Lag(monkeypatch, 50)
    engine = make_engine("sdar_b8", SPARSE)
    requests = [
        engine.add_request(
            random_prompt(20, block),
            SamplingParams(
                max_tokens=120,
                ignore_eos=True,
                confidence_threshold=None,
                denoising_steps=4,
                block_length=block,
            ),
        )
        for block in (4, 8, 16)
    ]
    while not all(r.phase is Phase.DECODE for r in requests):
        engine.step()
    before = [r.counters.forwards for r in requests]
    while all(r.phase is not Phase.FINISHED for r in requests) and requests[0].counters.blocks < 12:
        engine.step()
    done = [r.counters.forwards - b for r, b in zip(requests, before, strict=True)]
    assert min(done) > max(done) // 2

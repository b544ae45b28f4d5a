"""Sets that are chosen anew within a block or at its begin, because what they were chosen for has changed."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import OffloadConfig
from herald.engine.blocks import BlockTable
from herald.engine.planner import Part, StepPlanner
from herald.engine.request import Request
from herald.engine.resident import SetUpdate
from herald.engine.retriever import Retriever, Selection
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.support import check_resident_rows, leaks, random_prompt, run, tokens

SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
PARAMS = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
UNSURE = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=0.6, denoising_steps=8)


def given_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Selection]]:
    """The selections that each request gives up from now on."""
    found: dict[str, list[Selection]] = defaultdict(list)
    give_up = StepPlanner._give_up

    def noting(planner: StepPlanner, request: Request, selection: Selection) -> None:
        found[request.request_id].append(selection)
        give_up(planner, request, selection)

    monkeypatch.setattr(StepPlanner, "_give_up", noting)
    return found


@pytest.mark.parametrize("lag", [1, 2])
def test_refresh_within_a_block(make_engine: MakeEngine, lag: int) -> None:
    """A refresh changes the set at one fixed step, to true rows, however long its selection takes."""
    slow = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=8)
    offload = OffloadConfig(kv_budget=0.2, refresh_step=1, refresh_lag=lag, lookahead_step=5, **SMALL)
    prompts = [random_prompt(n, n) for n in (61, 150, 333)]

    def decode(delay: float) -> list[list[int]]:
        engine = make_engine("sdar_b8", offload)
        engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(delay))
        compared: list[int] = []
        requests = run(engine, prompts, slow, lambda live: compared.append(check_resident_rows(engine, live)))
        assert sum(compared) > 10_000
        assert not leaks(engine)
        spans = [s for s in engine.trace.spans() if s.kind == "selection"]
        assert len(spans) >= 2 * len({(s.request_id, s.block) for s in spans}) - 6  # refresh and look-ahead
        return tokens(requests)

    found = decode(0.0)
    assert decode(0.01) == found
    plain = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, lookahead_step=5, **SMALL))
    assert tokens(run(plain, prompts, slow)) != found


def test_refresh_of_everything_equals_dense(make_engine: MakeEngine) -> None:
    prompts = [random_prompt(n, n) for n in (7, 64, 200)]
    expected = tokens(run(make_engine("sdar_b8"), prompts, PARAMS))
    offload = OffloadConfig(kv_budget=1.0, difference_only=False, refresh_step=1, refresh_lag=1, **SMALL)
    assert tokens(run(make_engine("sdar_b8", offload), prompts, PARAMS)) == expected


@pytest.mark.parametrize("lookahead_step", [1, 2, 9])
def test_what_follows_many_commits_commits_with_its_own_rows(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, lookahead_step: int
) -> None:
    """``refresh_commits``: such a step runs when the rows are there that its own queries chose, and a
    look-ahead under way does not keep them from it."""
    offload = OffloadConfig(kv_budget=0.2, refresh_commits=0.25, lookahead_step=lookahead_step, **SMALL)
    engine = make_engine("sdar_b8", offload)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.003))
    order: list[tuple[str, int, int]] = []
    many: list[tuple[int, int]] = []
    apply, plan = StepPlanner._apply, StepPlanner._plan_request

    def noting(planner: StepPlanner, request: Request, update: SetUpdate, block: int) -> None:
        order.append(("rows", block, request.step if request.left else 0))
        apply(planner, request, update, block)

    def planning(planner: StepPlanner, request: Request, *rest: object) -> Part:
        inside, committed = request.left > 0, request.committed
        part = plan(planner, request, *rest)  # type: ignore[arg-type]
        order.append(("asks" if part.step < 0 else "step", part.block, part.step))
        if part.step > 0 and inside and committed >= 2:
            many.append((part.block, part.step))
        return part

    monkeypatch.setattr(StepPlanner, "_apply", noting)
    monkeypatch.setattr(StepPlanner, "_plan_request", planning)
    dropped = given_up(monkeypatch)
    compared: list[int] = []
    (request,) = run(
        engine,
        [random_prompt(304, 3)],
        UNSURE,
        lambda live: compared.append(check_resident_rows(engine, live)),
    )
    assert bool(dropped) == (lookahead_step < 9)
    assert len(request.output_ids) == 44 and not leaks(engine) and sum(compared) > 1000
    steps = [entry for entry in order if entry[0] == "step" and entry[2] > 0]
    assert 3 <= len(many) < len(steps)
    for what, block, step in steps:
        before = order[order.index((what, block, step)) - 1]
        assert (before == ("rows", block, step)) == ((block, step) in many)


@pytest.mark.parametrize("context", ["draft", "block"])
def test_a_block_whose_lookahead_saw_a_wrong_draft_selects_anew(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    """``refresh_commits``: its rows are used only where less than half the share of the draft was wrong.
    Tokens do not depend on how long a selection takes."""
    offload = OffloadConfig(kv_budget=0.2, refresh_commits=0.4, lookahead_context=context, **SMALL)
    prompts = [random_prompt(n, n) for n in (61, 150, 304)]
    drafts: dict[tuple[str, int], list[int]] = {}
    wrong: dict[tuple[str, int], int] = {}
    plan, boundary = StepPlanner._plan_request, StepPlanner._plan_boundary_selection
    exposed: set[tuple[str, int]] = set()

    def planning(planner: StepPlanner, request: Request, table: BlockTable, *rest: object) -> Part:
        at = request.request_id, request.block
        if request.left == 0 and at in drafts and at not in wrong:
            final = table.tokens[request.slot].tolist()
            wrong[at] = sum(a != b for a, b in zip(drafts[at], final, strict=True))
        part = plan(planner, request, table, *rest)  # type: ignore[arg-type]
        if part.looks_ahead:
            seen = table.draft if context == "draft" else table.tokens
            drafts[at] = seen[request.slot].tolist()
        return part

    def selecting(planner: StepPlanner, request: Request, *rest: object) -> Part:
        exposed.add((request.request_id, request.block))
        return boundary(planner, request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(StepPlanner, "_plan_request", planning)
    monkeypatch.setattr(StepPlanner, "_plan_boundary_selection", selecting)

    def decode(delay: float) -> list[list[int]]:
        engine = make_engine("sdar_b8", offload)
        engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(delay))
        for record in (drafts, wrong, exposed):
            record.clear()
        requests = run(engine, prompts, UNSURE, lambda live: check_resident_rows(engine, live) and None)
        assert not leaks(engine)
        assert {at for at, count in wrong.items() if count >= 0.2 * 8} == exposed & set(wrong)
        assert 0 < len(exposed & set(wrong)) < len(wrong) or context == "block"
        return tokens(requests)

    assert decode(0.0) == decode(0.004)


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"refresh_commits": 0.2}, UNSURE),
        ({"refresh_step": 3, "refresh_lag": 1, "lookahead_step": 5}, replace(PARAMS, denoising_steps=8)),
        ({"on_late": "proceed", "lookahead_step": 99}, replace(PARAMS, denoising_steps=8)),
    ],
    ids=["many commits", "refresh step", "proceed"],
)
def test_only_masks_select_for_steps_to_come(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], params: SamplingParams
) -> None:
    """What a block has committed has no say in its own selection; in a look-ahead all positions have."""
    engine = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, **{**SMALL, **options}))
    own: list[int] = []
    select = Retriever.select

    def noting(
        retriever: Retriever, request: Request, queries: Any, lse: torch.Tensor, block: int, *rest: Any
    ):
        votes = lse.isfinite()
        if block > request.block:
            assert votes.all()
        else:
            masked = engine.decoder.table(request.block_length).masked[request.slot]
            assert votes.equal(masked.view(1, -1, 1).expand_as(votes))
            own.append(int(masked.sum()))
        return select(retriever, request, queries, lse, block, *rest)

    monkeypatch.setattr(Retriever, "select", noting)
    requests = run(engine, [random_prompt(n, n) for n in (64, 304)], params)
    assert all(len(request.output_ids) == 44 for request in requests)
    assert len(own) > 4 and 0 < min(own) < 8


def test_selections_that_were_given_up_are_forgotten(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose turn has not come choose nothing, and none is kept once nothing can be on its way."""
    engine = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, refresh_commits=0.2, **SMALL))
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.02))
    dropped = given_up(monkeypatch)
    kept: list[int] = []
    long = replace(UNSURE, max_tokens=120)
    (request,) = run(
        engine, [random_prompt(304, 3)], long, lambda live: kept.extend(len(r.missed) for r in live)
    )
    selections = dropped[request.request_id]
    assert len(selections) > 5 and max(kept) < 4
    assert engine.retriever is not None
    engine.retriever.drain()
    late = [s for s in selections if s.positions.exception() is not None]
    assert late and all(isinstance(s.update.exception(), CancelledError) for s in late)
    scanned = [s for s in engine.trace.spans() if s.kind == "selection"]
    asked = request.counters.forwards - request.counters.steps + request.counters.lookaheads
    assert len(scanned) <= asked + 1 - len(late)
    assert not leaks(engine)


def test_races_with_selections_that_are_given_up(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random sleeps in the selector's and the transfer's threads change no token."""
    prompts = [random_prompt(n, n) for n in (90, 170)]
    engine = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, verify_transfers=True, **SMALL))
    rng = random.Random(0)

    def nap() -> None:
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.004)

    expected = tokens(run(engine, prompts, UNSURE))
    assert engine.retriever is not None and engine.memory.store is not None
    engine.retriever.delay = nap
    engine.memory.store.transfer.delay = nap
    dropped = given_up(monkeypatch)
    for trial in range(12):
        assert tokens(run(engine, prompts, UNSURE)) == expected, trial
    all_dropped = [selection for some in dropped.values() for selection in some]
    begun = [s for s in all_dropped if s.positions.exception() is None]
    assert 0 < len(begun) < len(all_dropped) and not leaks(engine)


def test_proceed_waits_for_nothing_after_many_commits(make_engine: MakeEngine) -> None:
    engine = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, on_late="proceed", **SMALL))
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.004))
    compared: list[int] = []
    (request,) = run(
        engine,
        [random_prompt(304, 3)],
        UNSURE,
        lambda live: compared.append(check_resident_rows(engine, live)),
    )
    assert request.counters.forwards == request.counters.steps and sum(compared) > 1000
    assert request.counters.exposed_seconds == 0 and not leaks(engine)


def test_many_commits_change_nothing_where_every_row_is_there(make_engine: MakeEngine) -> None:
    prompts = [random_prompt(n, n) for n in (7, 64, 200)]
    expected = tokens(run(make_engine("sdar_b8"), prompts, UNSURE))
    offload = OffloadConfig(kv_budget=1.0, difference_only=False, refresh_commits=0.1, **SMALL)
    assert tokens(run(make_engine("sdar_b8", offload), prompts, UNSURE)) == expected


def test_a_refresh_that_misses_its_block_is_dropped(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a threshold, blocks that end before the refresh lands select at their boundary, each of them."""
    offload = OffloadConfig(kv_budget=0.2, refresh_step=1, refresh_lag=9, **SMALL)
    engine = make_engine("sdar_b8", offload)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.003))
    unsure = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=1.0, denoising_steps=4)
    dropped = given_up(monkeypatch)
    requests = run(engine, [random_prompt(n, n) for n in (90, 300)], unsure)
    for request in requests:
        assert len(dropped[request.request_id]) > 2 and len(request.output_ids) == 44
        assert request.counters.lookaheads == 0
        assert request.counters.boundary_selections == request.counters.blocks - 1
        assert request.counters.late_selections == 0
    assert not leaks(engine)


def test_a_refresh_that_leaves_no_lookahead_is_refused(make_engine: MakeEngine) -> None:
    """A known number of steps has to have one after the refresh has landed."""
    prompt = random_prompt(88, 1)  # whole blocks: the first one takes all steps too
    for step, lag in ((1, 3), (3, 1), (2, 9)):
        offload = OffloadConfig(kv_budget=0.2, refresh_step=step, refresh_lag=lag, **SMALL)
        engine = make_engine("sdar_b8", offload)
        with pytest.raises(
            InvalidOption, match="a block of 4 steps; use a sum of at most 3, or refresh_step=0"
        ):
            engine.add_request(prompt, PARAMS)
        assert not engine.has_work
    fits = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, refresh_step=1, refresh_lag=2, **SMALL))
    (request,) = run(fits, [prompt], PARAMS)
    assert request.counters.lookaheads == request.counters.blocks - 1
    dense = make_engine("sdar_b8", OffloadConfig(enabled=False, refresh_step=3, refresh_lag=9))
    run(dense, [prompt], PARAMS)
    with pytest.raises(
        InvalidOption, match="a block of 2 steps; use refresh_step=0, or more denoising steps"
    ):
        fits.add_request(prompt, SamplingParams(max_tokens=8, confidence_threshold=None, denoising_steps=2))

"""The late look-ahead: when it is due, on a simulated clock, and what it does to an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from herald.config import OffloadConfig
from herald.engine.engine import Engine
from herald.engine.lookahead import LateLookahead, Pace, quantile
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.support import check_resident_rows, random_prompt, run, tokens

SMALL = {"sink_rows": 2, "recent_rows": 8, "min_resident_rows": 16}
FIXED = SamplingParams(max_tokens=60, ignore_eos=True, confidence_threshold=None, denoising_steps=8)
UNSURE = SamplingParams(max_tokens=60, ignore_eos=True, confidence_threshold=0.05, denoising_steps=8)


def test_quantile() -> None:
    assert [quantile([3, 1, 2, 4], share) for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert quantile([7], 0.5) == 7


def test_pace_is_a_low_estimate() -> None:
    pace = Pace()
    assert pace.steps_left(8) is None
    for before, after in ((8, 5), (5, 2), (2, 0)):
        pace.saw(before, after)
    assert [pace.steps_left(n) for n in (8, 7, 5, 4, 2, 1)] == [3, 2, 2, 1, 1, 1]
    for _ in range(3):
        pace.saw(8, 0)
    assert pace.steps_left(8) == 1
    for _ in range(40):  # old blocks are forgotten
        for left in range(8, 0, -1):
            pace.saw(left, left - 1)
    assert pace.steps_left(8) == 8 and pace.steps_left(3) == 3


def measured(step: float, busy: float, bring: float, margin: float = 1.0) -> LateLookahead:
    lookahead = LateLookahead(margin)
    assert not lookahead.measured
    lookahead.step_took(step)
    assert not lookahead.measured
    lookahead.selection_took(busy, bring)
    assert lookahead.measured
    return lookahead


def test_one_request_looks_ahead_in_its_last_safe_step() -> None:
    lookahead = measured(step=5, busy=8, bring=4)
    assert [lookahead.due([to_come], 0)[0] for to_come in (9, 4, 3, 2, 0)] == [False, False, True, True, True]
    assert lookahead.steps_needed(1) == 3
    careful = measured(step=5, busy=8, bring=4, margin=2.0)  # 24 instead of 12
    assert [careful.due([to_come], 0)[0] for to_come in (6, 5)] == [False, True]
    assert lookahead.due([], 0) == []


def test_requests_that_end_first_go_first_and_the_queue_stays_short() -> None:
    lookahead = measured(step=5, busy=5, bring=0)
    assert lookahead.due([9, 8, 7], 0) == [False] * 3
    assert lookahead.due([4, 3, 2], 0) == [False] * 3  # each has its turn if they begin a step later
    assert lookahead.due([3, 3, 2], 0) == [False, False, True]  # one a step keeps the queue busy
    assert lookahead.due([3, 3, 3], 0) == [True, False, False]
    assert lookahead.due([2, 2], 1) == [True, False]
    assert lookahead.due([2, 2], 2, under_way=0) == [False, False]  # there is work for this step already
    assert lookahead.due([2, 2], 2, under_way=1) == [True, False]
    assert lookahead.due([2, 2], 2, running=1) == [True, False]
    assert measured(step=5, busy=1, bring=0).due([1] * 6, 0) == [True] * 5 + [False]


def test_a_selection_behind_another_one_adds_less() -> None:
    lookahead = measured(step=5, busy=9, bring=1)
    assert lookahead.steps_needed(4) == 8
    lookahead.selection_took(3, 1, waited=True)
    assert lookahead.steps_needed(1) == 3 and lookahead.steps_needed(4) == 4
    assert lookahead.due([5] * 4, 0) == [False] * 4  # there after 15, 18, 21 and 24, a step later
    assert lookahead.due([5] * 5, 0) == [True, False, False, False, False]


def test_nobody_lets_its_last_step_go_by() -> None:
    lookahead = measured(step=1, busy=4, bring=0)
    assert lookahead.due([2, 2, 2], 1) == [False] * 3  # the queue is long enough
    assert lookahead.due([0, 2, 0], 1) == [True, False, True]


def test_measurements_are_quantiles_of_the_recent_past() -> None:
    lookahead = measured(step=5, busy=500, bring=500)
    for _ in range(100):
        lookahead.step_took(1)
        lookahead.selection_took(2, 1)
    assert lookahead.step_seconds == 1 and lookahead.steps_needed(1) == 4
    for _ in range(4):
        lookahead.selection_took(9, 1)
    assert lookahead.steps_needed(1) == 11  # the slow tenth counts


@given(
    st.lists(st.integers(0, 40), max_size=12),
    st.integers(0, 6),
    st.floats(0.1, 20),
    st.floats(0, 50),
    st.floats(0, 50),
    st.floats(1, 3),
)
def test_none_is_due_before_it_can_be(
    to_come: list[int], queued: int, step: float, busy: float, bring: float, margin: float
) -> None:
    lookahead = measured(step, busy, bring, margin)
    needed = lookahead.steps_needed(len(to_come) + queued)
    looks = lookahead.due(to_come, queued)
    assert all(steps <= needed for steps, look in zip(to_come, looks, strict=True) if look)
    # whoever looks ahead, those whose blocks end before do too
    assert max([s for s, look in zip(to_come, looks, strict=True) if look], default=0) <= min(
        [s for s, look in zip(to_come, looks, strict=True) if not look], default=99
    )


@dataclass
class Clock:
    """A device that steps all requests together, and a queue that selects for one after the other.

    Attributes:
        step, busy, bring: seconds of a step, a selection, a transfer.
        steps: of each request's blocks.
        begins: the step in which each request begins its first block.
    """

    step: float
    busy: float
    bring: float
    steps: list[int]
    begins: list[int]
    in_time: int = 0
    late: int = 0
    drafts: list[int] = field(default_factory=list)

    def run(self, lookahead: LateLookahead | None, blocks: int, spread: int = 4) -> Clock:
        """Count the blocks whose rows are there in time; without a controller, step 1 looks ahead."""
        now = free = 0.0
        at = [-begin for begin in self.begins]  # the step of its block that each is in, below 0 not begun
        left = [blocks] * len(at)
        arrives: list[float | None] = [None] * len(at)
        queue: list[float] = []  # when each selection is chosen

        def select(i: int) -> None:
            nonlocal free
            free = max(free, now) + self.busy
            queue.append(free)
            arrives[i] = free + self.bring

        while any(left):
            able = [i for i, s in enumerate(at) if left[i] and 1 <= s < self.steps[i] and arrives[i] is None]
            to_come = [self.steps[i] - 1 - at[i] for i in able]
            if lookahead is None:
                looks = able[:spread]
            else:
                waiting = [chosen for chosen in queue if chosen > now + 1e-9]
                running = self.busy - (waiting[0] - now) if waiting else 0.0
                due = lookahead.due(to_come, len(waiting), running)
                looks = [i for i, look in zip(able, due, strict=True) if look]
            now += self.step
            for i in sorted(looks, key=lambda i: self.steps[i] - at[i]):
                self.drafts.append(self.steps[i] - 1 - at[i])
                select(i)
            for i, steps in enumerate(self.steps):
                at[i] += at[i] < steps
                if not left[i] or at[i] < steps:
                    continue
                arrival = arrives[i]
                if arrival is None or arrival > now + 1e-9:
                    if at[i] == steps:
                        self.late += 1
                        at[i] += 1  # it waits
                    if arrival is None:
                        select(i)
                    continue
                self.in_time += at[i] == steps
                at[i], arrives[i] = 0, None
                left[i] -= 1
        return self


Times = tuple[float, float, float]
TIMES = st.tuples(st.floats(0.5, 20), st.floats(0.01, 30), st.floats(0, 30))


def simulate(times: Times, steps: list[int], begins: list[int], blocks: int) -> tuple[Clock, Clock]:
    fixed = Clock(*times, steps, begins).run(None, blocks)
    late = Clock(*times, steps, begins).run(measured(*times), blocks)
    return fixed, late


@settings(deadline=None)
@given(st.integers(1, 10), st.integers(3, 32), TIMES)
def test_late_is_never_behind_a_fixed_step(batch: int, steps: int, times: Times) -> None:
    """All blocks end together, the worst case for the queue: as many find their rows as with step 1."""
    fixed, late = simulate(times, [steps] * batch, [0] * batch, blocks=1)
    assert late.in_time >= fixed.in_time
    assert len(late.drafts) == batch


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 20), st.integers(0, 20)), min_size=1, max_size=8),
    st.floats(0.5, 20),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
@example([(3, 0)] * 5, 1.0, 1.0, 0.0)
def test_what_can_be_hidden_is_hidden(
    requests: list[tuple[int, int]], step: float, load: float, share: float
) -> None:
    """Nobody waits where the steps after step 1 of the shortest block have room for everybody's selection.

    Drafts are then as late as those of a fixed step or later. A fixed step may be late itself: of five
    requests one looks ahead a step after the others.
    """
    steps, begins = [list(values) for values in zip(*requests, strict=True)]
    room = load * (min(steps) - 2) * step * 0.999
    times = (step, (1 - share) * room / len(steps), share * room)
    fixed, late = simulate(times, steps, begins, blocks=5)
    assert late.late == 0 and late.in_time == 5 * len(steps)
    if fixed.late == 0:
        assert sum(late.drafts) / len(late.drafts) <= sum(fixed.drafts) / len(fixed.drafts) + 1e-9


def test_a_late_draft_is_late() -> None:
    fixed, late = simulate((5, 4, 3), [16] * 4, [0] * 4, blocks=4)
    assert fixed.late == late.late == 0
    assert set(late.drafts) == {4, 3, 2} and min(fixed.drafts) == 14


class Pinned(LateLookahead):
    """A look-ahead in the step after which a given number of steps come."""

    def __init__(self, to_come: int) -> None:
        super().__init__()
        self.to_come = to_come

    def due(self, to_come, queued, running=0.0, under_way=0):
        return [steps <= self.to_come for steps in to_come]

    def steps_needed(self, selections: int) -> int:
        return self.to_come


def late_engine(make_engine: MakeEngine, **options: object) -> Engine:
    return make_engine(
        "sdar_b8", OffloadConfig(**{"kv_budget": 0.2, "lookahead": "late", **SMALL, **options})
    )


def looks_of(engine: Engine) -> dict[tuple[str, int], int]:
    """The step of each (request, block) in which its look-ahead ran."""
    return {
        (s.request_id, s.block): s.step for s in engine.trace.spans() if s.kind == "forward" and s.lookahead
    }


@pytest.mark.parametrize("params", [FIXED, UNSURE], ids=["fixed steps", "threshold"])
@pytest.mark.parametrize("on_late", ["wait", "proceed"])
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_late_generations_are_whole(
    make_engine: MakeEngine, params: SamplingParams, on_late: str, delay: float
) -> None:
    engine = late_engine(make_engine, on_late=on_late)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(delay))
    compared: list[int] = []
    prompts = [random_prompt(n, n) for n in (61, 150, 333)]
    requests = run(engine, prompts, params, lambda live: compared.append(check_resident_rows(engine, live)))
    assert sum(compared) > 1000
    assert all(len(r.output_ids) == 60 and r.error is None for r in requests)
    assert engine.decoder.planner.clock is not None
    assert engine.decoder.planner.clock.lookahead.measured
    assert engine.decoder.planner.clock.queued == 0


@pytest.mark.parametrize("step", [1, 3, 6])
def test_pinned_equals_a_fixed_step(make_engine: MakeEngine, step: int) -> None:
    prompts = [random_prompt(n, n) for n in (64, 152, 336)]  # whole blocks: the first takes all steps too
    fixed = make_engine("sdar_b8", OffloadConfig(kv_budget=0.2, lookahead_step=step, **SMALL))
    expected = tokens(run(fixed, prompts, FIXED))
    engine = late_engine(make_engine)
    clock = engine.decoder.planner.clock
    assert clock is not None
    clock.lookahead = Pinned(7 - step)
    clock.lookahead.step_took(1.0)
    clock.lookahead.selection_took(1.0, 1.0)
    assert tokens(run(engine, prompts, FIXED)) == expected
    assert set(looks_of(engine).values()) == {step}
    assert sorted(looks_of(engine)) == sorted(looks_of(fixed))


def test_everything_selected_late_equals_dense(make_engine: MakeEngine) -> None:
    prompts = [random_prompt(n, n) for n in (7, 64, 200)]
    for params in (FIXED, UNSURE):
        expected = tokens(run(make_engine("sdar_b8"), prompts, params))
        engine = late_engine(make_engine, kv_budget=1.0, difference_only=False)
        assert tokens(run(engine, prompts, params)) == expected


def test_quick_selections_are_asked_for_late(make_engine: MakeEngine) -> None:
    """Fixed until something is measured, and near the block's end once selections are known to be quick."""
    engine = late_engine(make_engine)
    clock = engine.decoder.planner.clock
    assert clock is not None
    tell = clock.lookahead.step_took
    clock.lookahead.step_took = lambda seconds: tell(10.0)  # type: ignore[method-assign]
    (request,) = run(engine, [random_prompt(336, 5)], FIXED)
    looks = [step for _, step in sorted(looks_of(engine).items())]
    assert looks[0] == 1 and set(looks[1:]) == {6}
    assert request.counters.boundary_selections == 0


def test_slow_selections_are_asked_for_early(make_engine: MakeEngine) -> None:
    """Where nothing can be hidden the first step that may does it."""
    engine = late_engine(make_engine, lookahead_step=2)
    engine.on_retriever = lambda retriever, store: setattr(retriever, "delay", lambda: time.sleep(0.02))
    clock = engine.decoder.planner.clock
    assert clock is not None
    tell = clock.lookahead.step_took
    clock.lookahead.step_took = lambda seconds: tell(0.001)  # type: ignore[method-assign]
    run(engine, [random_prompt(336, 5)], FIXED)
    assert set(looks_of(engine).values()) == {2}


def test_late_after_a_refresh(make_engine: MakeEngine) -> None:
    engine = late_engine(make_engine, refresh_step=1, refresh_lag=2)
    clock = engine.decoder.planner.clock
    assert clock is not None
    clock.lookahead = Pinned(1)
    clock.lookahead.step_took(1.0)
    clock.lookahead.selection_took(1.0, 1.0)
    compared: list[int] = []
    prompts = [random_prompt(n, n) for n in (64, 336)]
    run(engine, prompts, FIXED, lambda live: compared.append(check_resident_rows(engine, live)))
    assert sum(compared) > 1000 and set(looks_of(engine).values()) == {6}


def test_unknown_values_are_refused() -> None:
    with pytest.raises(InvalidOption, match="lookahead='soon' is not valid; use 'fixed' or 'late'"):
        OffloadConfig(lookahead="soon")  # type: ignore[arg-type]

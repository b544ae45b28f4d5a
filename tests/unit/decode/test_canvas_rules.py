"""What each rule takes of a block, and that every rule ends with no mask left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herald.decode import BlockState, CanvasPolicy, policy_of, taken
from herald.decode.canvas import (
    CarriedThreshold,
    Factor,
    FirstAlone,
    FixedQuota,
    Rule,
    Threshold,
    TimeSchedule,
)
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams


def decode(rule: Rule, values: Sequence[Sequence[float]]) -> list[list[int]]:
    """Positions that each step takes; step s ranks by ``values[s]``, the last one for all that follow."""
    count = len(values[0])
    state, masked, steps = BlockState.begin(count), torch.ones(count, dtype=torch.bool), []
    while state.left:
        assert len(steps) < 3 * count + 60
        take = rule.take(state)
        row = torch.tensor(values[min(state.step, len(values) - 1)])
        write = taken(row, masked, take)
        assert not (write & ~masked).any()
        if take.is_certain:
            assert int(write.sum()) == take.look
        masked &= ~write
        state.took(take, int(write.sum()))
        assert state.left == int(masked.sum())
        steps.append(write.nonzero()[:, 0].tolist())
    return steps


FALLING = [[1.0 - i / 16 for i in range(8)]]


@pytest.mark.parametrize(
    ("steps", "counts"), [(0, [1] * 8), (3, [3, 3, 2]), (8, [1] * 8), (20, [1] * 8), (1, [8])]
)
def test_fixed_quota(steps: int, counts: list[int]) -> None:
    assert [len(each) for each in decode(FixedQuota(steps), FALLING)] == counts


def test_threshold_takes_the_best_where_none_reaches_it() -> None:
    assert decode(Threshold(0.9), FALLING) == [[0, 1], [2], [3], [4], [5], [6], [7]]
    assert decode(Threshold(0.0), FALLING) == [list(range(8))]


def test_factor_is_the_equation_of_the_paper() -> None:
    """The largest n, reached without a gap, with (n + 1) (1 - c_n) <= factor; at least one."""
    values = [0.99, 0.95, 0.9, 0.7, 0.5, 0.2]
    for factor in (0.1, 0.3, 0.41, 1.0, 2.5, 10.0):
        n = 1
        while n < 6 and (n + 2) * (1 - values[n]) <= factor:
            n += 1
        assert decode(Factor(factor), [values])[0] == list(range(n)), factor


def test_factor_leaves_the_last_mask_that_fails() -> None:
    assert decode(Factor(1.0), [[0.9, 0.1]]) == [[0], [1]]


def test_time_schedule_may_take_none_and_ends_with_the_rest() -> None:
    """Counts of the published loop, steps of 12 positions in 12 and of 16 in 6 (golden cases of Dream)."""
    assert [len(x) for x in decode(TimeSchedule(12), [[0.5] * 12])] == [0, *[1] * 10, 2]
    assert [len(x) for x in decode(TimeSchedule(6), [[0.5] * 16])] == [2, 2, 2, 3, 3, 4]
    assert [len(x) for x in decode(TimeSchedule(1), [[0.5] * 5])] == [5]
    assert 30 < len(decode(TimeSchedule(40), [[0.5] * 4])) <= 40


def test_steps_that_take_nothing_are_passed_over() -> None:
    rule, state, taken_in = TimeSchedule(40), BlockState.begin(4), []
    while state.left:
        take = rule.next(state)
        assert take == rule.take(state) and take.look > 0
        taken_in.append((state.step, take.look))
        state.took(take, take.look)
    every = [(step, len(each)) for step, each in enumerate(decode(rule, [[0.5] * 4])) if each]
    assert taken_in == every and len(every) <= 4


def test_carried_threshold_looks_again_at_what_it_left() -> None:
    # two a step; the second of them fails and stands beside the next two
    values = [[0.95, 0.5, 0.4, 0.3], [0.0, 0.95, 0.92, 0.91], [0.0] * 4]
    assert decode(CarriedThreshold(0.9, 2), values) == [[0], [1, 2, 3]]
    assert decode(CarriedThreshold(0.9, 2), [[0.4, 0.3, 0.2, 0.1]]) == [[0], [1], [2], [3]]
    assert [len(x) for x in decode(CarriedThreshold(0.0, 3), [[0.5] * 7])] == [3, 2, 2]


def test_first_alone() -> None:
    rising = [[i / 8 for i in range(8)]]
    assert decode(FirstAlone(Threshold(0.7)), rising)[:2] == [[0], [6, 7]]
    counts = [len(x) for x in decode(FirstAlone(TimeSchedule(5)), rising)]
    assert counts == [1, 1, 1, 2, 3]
    with pytest.raises(InvalidOption, match="denoising_steps=1"):
        FirstAlone(TimeSchedule(1))


@given(
    st.integers(1, 24),
    st.integers(0, 30),
    st.floats(0, 1),
    st.integers(0, 2**31),
    st.sampled_from(["quota", "threshold", "factor", "schedule", "carried", "first", "first_schedule"]),
)
def test_no_mask_is_left(count: int, steps: int, level: float, seed: int, kind: str) -> None:
    rules: dict[str, Rule] = {
        "quota": FixedQuota(steps),
        "threshold": Threshold(level),
        "factor": Factor(level * 8 + 1e-3),
        "schedule": TimeSchedule(steps),
        "carried": CarriedThreshold(level, steps),
        "first": FirstAlone(Threshold(level)),
        "first_schedule": FirstAlone(TimeSchedule(steps if steps != 1 else 2)),
    }
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(60, count, generator=generator).tolist()
    found = decode(rules[kind], values)
    assert sorted(position for step in found for position in step) == list(range(count))


def canvas_policy(family: str) -> CanvasPolicy:
    policy = policy_of(family)
    assert isinstance(policy, CanvasPolicy)
    return policy


def test_released_defaults() -> None:
    llada = canvas_policy("llada")
    params = llada.settle(SamplingParams(max_tokens=128))
    assert (params.confidence_threshold, params.cache) == (None, "none")
    plan = llada.plan(params, 32)
    assert (plan.length, plan.block_length, plan.num_blocks) == (128, 32, 4)
    assert (plan.rank, plan.rule) == ("confidence", FixedQuota(0))
    dream = canvas_policy("dream")
    plan = dream.plan(dream.settle(SamplingParams(max_tokens=100)), 0)
    assert (plan.length, plan.block_length, plan.cache) == (100, 100, "none")
    assert (plan.rank, plan.rule) == ("entropy", TimeSchedule(0))
    assert policy_of("sdar").settle(SamplingParams()).confidence_threshold == 0.9


def test_what_options_choose() -> None:
    llada, dream = canvas_policy("llada"), canvas_policy("dream")

    def llada_plan(**options: object) -> tuple[int, int, Rule]:
        plan = llada.plan(llada.settle(replace(SamplingParams(max_tokens=40), **options)), 32)
        return plan.length, plan.block_length, plan.rule

    def dream_plan(**options: object) -> tuple[int, int, str, Rule]:
        plan = dream.plan(dream.settle(replace(SamplingParams(max_tokens=40), **options)), 0)
        return plan.length, plan.block_length, plan.rank, plan.rule

    assert llada_plan() == (64, 32, FixedQuota(0))
    assert llada_plan(max_tokens=5, confidence_threshold=0.8) == (5, 5, Threshold(0.8))
    assert llada_plan(block_length=8, confidence_factor=1.0) == (40, 8, Factor(1.0))
    assert dream_plan(algorithm="maskgit_plus") == (40, 40, "confidence", TimeSchedule(0))
    assert dream_plan(algorithm="topk_margin", denoising_steps=7) == (40, 40, "margin", TimeSchedule(7))
    assert dream_plan(confidence_threshold=0.9) == (40, 40, "confidence", CarriedThreshold(0.9, 0))
    first = FirstAlone(TimeSchedule(0))
    assert dream_plan(cache="dual") == (64, 32, "entropy", first)
    assert dream_plan(cache="prefix", block_length=10) == (40, 10, "entropy", first)
    cached = dream_plan(cache="dual", confidence_threshold=0.9)
    assert cached == (64, 32, "confidence", FirstAlone(Threshold(0.9)))


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llada", {"algorithm": "entropy"}, "algorithm='entropy'"),
        ("llada_moe", {"confidence_factor": 1.0, "confidence_threshold": 0.9}, "confidence_factor=1.0"),
        ("llada", {"editing_threshold": 0.5}, "editing_threshold=0.5"),
        ("dream", {"confidence_factor": 1.0}, "confidence_factor=1.0"),
        ("dream", {"algorithm": "entropy", "confidence_threshold": 0.9}, "algorithm='entropy'"),
        ("sdar", {"cache": "dual"}, "cache='dual'"),
        ("sdar_moe", {"algorithm": "entropy"}, "algorithm='entropy'"),
        ("llada2_moe", {"confidence_factor": 1.0}, "confidence_factor=1.0"),
    ],
)
def test_options_of_another_family_are_refused(family: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidOption, match=named.replace(".", r"\.")):
        policy_of(family).settle(replace(SamplingParams(), **options))


@pytest.mark.parametrize(
    "wrong",
    [
        {"confidence_factor": 0.0},
        {"confidence_factor": -1.0},
        {"algorithm": "origin"},
        {"cache": "exact"},
        {"confidence_threshold": "off"},
    ],
)
def test_options_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]

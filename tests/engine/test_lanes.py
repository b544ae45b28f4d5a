"""What a step is told: its integers, their padding, and the block table they point into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herald.engine.blocks import BlockTable
from herald.engine.lanes import StepInputs, StepPlan, next_power_of_2, round_kept, round_lanes
from herald.sampling_params import SamplingParams


def plan_of_two() -> StepPlan:
    """A request that opens a block, and one in the middle of its own with a look-ahead."""
    plan = StepPlan()
    closed = plan.add_lane(8, 96, 0, 40)
    plan.final_lane.append(closed)
    plan.add_block(plan.add_lane(0, 104, 0, 40, closed), 0, True, 3)
    plan.add_block(plan.add_lane(1, 16, 60, 16), 1, False, 2)
    draft = plan.add_lane(5, 16, 60, 16)
    plan.capture_lane.append(plan.add_lane(12, 24, 60, 16, draft))
    return plan


def test_padding_points_at_the_spare_slot_only() -> None:
    plan = plan_of_two()
    exact, padded = plan.shape(False, 0), plan.shape(False, 2)
    assert (exact.lanes, exact.logits, exact.finals, exact.captures) == (5, 2, 1, 1)
    assert (padded.lanes, padded.logits, padded.finals, padded.captures) == (6, 2, 1, 1)
    assert exact.max_length == 64
    for shape in (exact, padded):
        packed = torch.from_numpy(plan.pack(shape, masks_row=12, spare_slot=3))
        assert packed.dtype == torch.int64 and packed.numel() == sum(shape.sizes)
        inputs = StepInputs.views(packed, shape)
        assert inputs.source[:5].tolist() == [8, 0, 1, 5, 12]
        assert inputs.position[:5].tolist() == [96, 104, 16, 16, 24]
        assert inputs.parent[:5].tolist() == [-1, 0, -1, -1, 3]
        assert inputs.length[:5].tolist() == [40, 40, 16, 16, 16]
        assert inputs.opening.tolist() == [1, 0] and inputs.quota.tolist() == [3, 2]
        assert inputs.final_lane.tolist() == [0] and inputs.capture_lane.tolist() == [4]
        assert inputs.source[5:].eq(12).all() and not inputs.length[5:].any()
    empty = StepPlan().pack(padded, masks_row=12, spare_slot=3)
    inputs = StepInputs.views(torch.from_numpy(empty), padded)
    assert inputs.slot.eq(3).all() and not inputs.opening.any() and not inputs.quota.any()


@pytest.mark.parametrize("rounded", [round_lanes, round_kept, next_power_of_2])
def test_rounding_never_loses_a_lane(rounded) -> None:
    values = [rounded(count) for count in range(200)]
    assert all(value >= count for count, value in enumerate(values))
    assert values == sorted(values) and values[0] == 0
    assert all(rounded(value) == value for value in values)


def test_shapes_of_a_batch_do_not_depend_on_who_waits() -> None:
    shapes = set()
    for ready in (5, 6, 7, 8):
        plan = StepPlan()
        for slot in range(ready):
            plan.add_block(plan.add_lane(slot, 0, 0, 40), slot, False, 1)
        shapes.add(plan.shape(False, 8))
    (shape,) = shapes
    assert (shape.lanes, shape.logits, shape.finals, shape.captures) == (8, 8, 0, 0)


def test_few_shapes_occur() -> None:
    assert len({round_lanes(count) for count in range(1, 101)}) <= 25
    assert {round_kept(count) for count in range(21)} == {0, 1, 4, 16, 64}


def test_slots_of_a_table() -> None:
    fixed = SamplingParams(confidence_threshold=None)
    edited = SamplingParams(confidence_threshold=0.5, editing_threshold=0.25, max_post_steps=7)
    table = BlockTable(4, 2, 99, torch.device("cpu"))
    first = table.take(np.array([1, 2, 99, 99]), np.array([False, False, True, True]), fixed)
    second = table.take(np.array([99] * 4), np.array([True] * 4), edited)
    assert {first, second, table.spare} == {0, 1, 2}
    assert table.rows[table.tokens_row(first)].tolist() == [1, 2, 99, 99]
    assert table.rows[table.draft_row(first)].tolist() == [1, 2, 99, 99]
    assert table.rows[table.masks_row].tolist() == [99] * 4
    assert table.threshold.tolist()[first] == float("inf") and table.threshold.tolist()[second] == 0.5
    assert table.edit_threshold.tolist()[second] == 0.25 and table.edits[second].tolist() == [0, 0, 7]
    assert not table.masked[table.spare].any()
    table.give_back(first)
    again = table.take(np.array([7, 99, 99, 99]), np.array([False, True, True, True]), edited)
    assert again == first and table.tokens[again].tolist() == [7, 99, 99, 99]
    assert table.edits[again].tolist() == [1, 0, 7]
    table.give_back(again)
    assert table.take(np.array([1, 2, 3, 99]), np.array([False, False, False, True]), fixed) == again
    assert table.edit_threshold.tolist()[again] == float("inf")

"""`commit_edits` against a few lines of Python, against `commit`, and when a block may end."""

from __future__ import annotations

import math

import pytest
import torch

from herald_kernels import commit, commit_edits
from tests.kernels import naive
from tests.kernels.support import Draw, Target

MASK = 99
NUM_SLOTS = 30
SPARE = NUM_SLOTS - 1
INF = float("inf")


class Step:
    """Random tables, some of whose slots are edited, and a step over some of them."""

    def __init__(self, target: Target, seed: int, num_rows: int, block_length: int) -> None:
        draw = Draw(target, seed)
        self.masked = draw.integers(0, 3, NUM_SLOTS, block_length) == 0
        self.masked[::4] = False
        self.masked[SPARE] = False
        self.tokens = draw.integers(0, 4, NUM_SLOTS, block_length).masked_fill(self.masked, MASK)
        self.draft = draw.integers(300, 400, NUM_SLOTS, block_length)
        self.slots = draw.permutation(SPARE)[:num_rows]
        self.candidate = draw.integers(0, 4, num_rows, block_length)
        self.candidate[self.candidate == 3] = MASK
        self.best = draw.integers(200, 300, num_rows, block_length)
        self.confidence = draw.integers(0, 9, num_rows, block_length).float() / 8
        self.quota = draw.integers(0, block_length + 2, num_rows)
        self.opening = draw.integers(0, 2, num_rows)
        thresholds = torch.tensor([INF, 0.9, 0.5, 0.0], device=target.device)
        self.threshold = thresholds[draw.integers(0, 4, NUM_SLOTS)]
        self.edit_threshold = thresholds[draw.integers(0, 4, NUM_SLOTS)]
        self.edit_threshold[SPARE] = INF
        counts = draw.integers(0, 4, NUM_SLOTS, 2)
        head = draw.integers(0, block_length + 1, NUM_SLOTS, 1)
        self.edits = torch.cat([head, counts], dim=1)

    def run(self, rows: list[int] | None = None) -> torch.Tensor:
        """The step over all rows or some."""
        chosen = slice(None) if rows is None else rows
        return commit_edits(
            self.tokens,
            self.masked,
            self.draft,
            self.edits,
            self.edit_threshold,
            self.slots[chosen],
            self.opening[chosen],
            self.best[chosen],
            self.candidate[chosen],
            self.confidence[chosen],
            self.quota[chosen],
            self.threshold,
            MASK,
        )

    def tables(self) -> list[torch.Tensor]:
        return [self.tokens, self.masked, self.draft, self.edits]


def one(target: Target, block_length: int = 4, most: int = 16) -> Step:
    """A step over one edited slot whose tokens are 0 and not masked; all confidences are 0.75."""
    step = Step(target, 1, 1, block_length)
    step.tokens[:], step.masked[:] = 0, False
    step.candidate[:] = 0
    step.confidence[:] = 0.75
    step.threshold[:], step.edit_threshold[:] = 0.5, 0.5
    step.quota[:], step.opening[:] = 1, 0
    step.edits[:] = torch.tensor([0, 0, most], device=target.device)
    return step


@pytest.mark.parametrize("block_length", [1, 4, 5, 8, 16, 32])
def test_does_what_the_definition_says(target: Target, block_length: int) -> None:
    step = Step(target, block_length, 24, block_length)
    step.confidence[3, ::2] = float("nan")
    tokens, masked, draft, edits = (table.clone() for table in step.tables())
    report = step.run()
    for row, slot in enumerate(step.slots.tolist()):
        was_masked, confidence = masked[slot].tolist(), step.confidence[row].tolist()
        threshold = float(step.edit_threshold[slot])
        head, done, most = edits[slot].tolist()
        head = 0 if step.opening[row] else head
        chosen, status = naive.commit_lane(
            was_masked, confidence, int(step.quota[row]), float(step.threshold[slot])
        )
        changed: list[int] = []
        if threshold < INF:
            changed = naive.edit_lane(
                tokens[slot].tolist(),
                was_masked,
                step.candidate[row].tolist(),
                confidence,
                head,
                threshold,
                MASK,
            )
            done = 0 if any(was_masked) else done + 1
            edits[slot, 0], edits[slot, 1] = head, done
            asked = [c for i, c in enumerate(confidence) if was_masked[i] or i >= head]
            if any(map(math.isnan, asked)):
                chosen, changed, status = [], [], -1
            elif status == 0:
                status = int(done < most and (any(was_masked) or bool(changed)))
        tokens[slot, chosen + changed] = step.candidate[row, chosen + changed]
        masked[slot, chosen] = False
        draft[slot] = torch.where(masked[slot], step.best[row], tokens[slot])
        assert int(report[row, 0]) == status
        assert torch.equal(report[row, 1:], torch.where(masked[slot], -1 - draft[slot], tokens[slot]))
    for found, expected in zip(step.tables(), (tokens, masked, draft, edits), strict=True):
        assert torch.equal(found, expected)


def test_slots_that_are_not_edited_are_committed_as_ever(target: Target) -> None:
    step, plain = Step(target, 40, 20, 16), Step(target, 40, 20, 16)
    step.edit_threshold[:] = INF
    before = step.edits.clone()
    expected = commit(
        *(plain.tokens, plain.masked, plain.draft, plain.slots, plain.best, plain.candidate),
        *(plain.confidence, plain.quota, plain.threshold),
    )
    assert torch.equal(step.run(), expected)
    for found, wanted in zip(step.tables()[:3], plain.tables()[:3], strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(step.edits, before)


def test_prompt_tokens_stay_until_the_next_block_opens(target: Target) -> None:
    step = one(target)
    slot = int(step.slots[0])
    step.edits[slot, 0] = 2
    step.candidate[:] = 7
    assert step.run().tolist() == [[1, 0, 0, 7, 7]]
    step.candidate[:], step.opening[:] = 8, 1
    assert step.run().tolist() == [[1, 8, 8, 8, 8]]
    assert step.edits[slot].tolist() == [0, 2, 16]


def test_a_block_ends_after_a_step_without_masks_and_edits(target: Target) -> None:
    step = one(target)
    slot = int(step.slots[0])
    step.masked[slot, 1], step.tokens[slot, 1] = True, MASK
    step.candidate[0, 1] = 5
    assert step.run().tolist() == [[1, 0, 5, 0, 0]]  # the last mask goes: not over yet
    step.candidate[0, 2] = 6
    assert step.run().tolist() == [[1, 0, 5, 6, 0]]
    assert step.edits[slot, 1] == 1
    assert step.run().tolist() == [[0, 0, 5, 6, 0]]


def test_a_block_ends_after_its_last_step_without_masks(target: Target) -> None:
    step = one(target, most=2)
    for token, status in ((3, 1), (4, 0)):
        step.candidate[:] = token
        assert step.run().tolist() == [[status] + [token] * 4]
    none = one(target, most=0)
    none.masked[none.slots] = True
    none.candidate[:] = 3
    assert none.run().tolist() == [[0, 3, 3, 3, 3]]


def test_a_mask_never_replaces_a_token(target: Target) -> None:
    step = one(target)
    step.candidate[:] = MASK
    assert step.run().tolist() == [[0, 0, 0, 0, 0]]
    assert not step.masked[step.slots].any()


def test_masks_begin_the_count_anew(target: Target) -> None:
    step = one(target)
    slot = int(step.slots[0])
    step.edits[slot, 1] = 9
    step.masked[slot] = True
    step.quota[:], step.threshold[:] = 2, INF
    assert int(step.run()[0, 0]) == 2
    assert step.edits[slot].tolist() == [0, 0, 16]


def test_rows_do_not_see_each_other(target: Target) -> None:
    together, alone = Step(target, 10, 8, 16), Step(target, 10, 8, 16)
    report = together.run()
    for row in range(8):
        assert torch.equal(alone.run([row])[0], report[row])
    for found, expected in zip(alone.tables(), together.tables(), strict=True):
        assert torch.equal(found, expected)


def test_padding_rows_on_one_slot_are_harmless(target: Target) -> None:
    step, alone = Step(target, 12, 6, 32), Step(target, 12, 6, 32)
    step.slots[2:5] = SPARE
    step.confidence[3] = float("nan")
    report = step.run()
    assert torch.equal(report[[0, 1, 5]], alone.run([0, 1, 5]))
    for row in (2, 3, 4):
        assert report[row].tolist() == [0, *alone.tokens[SPARE].tolist()]
    assert torch.equal(step.edits, alone.edits)
    assert step.run([]).shape == (0, 33)


def test_shapes_that_disagree_are_refused() -> None:
    target = Target("cpu", torch.float32, "torch", 0.0, 0)
    step = Step(target, 11, 4, 8)
    step.opening = step.opening[:3]
    with pytest.raises(ValueError, match=r"opening \(3,\).*4 rows"):
        step.run()
    step.candidate = step.candidate[:, :7]
    with pytest.raises(ValueError, match=r"candidate \(4, 7\)"):
        step.run()
    step.edits = step.edits[:, :2]
    with pytest.raises(ValueError, match=r"edits \(30, 2\)"):
        step.run()
    step.draft = step.draft[:3]
    with pytest.raises(ValueError, match=r"draft \(3, 8\)"):
        step.run()

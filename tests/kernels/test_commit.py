"""`commit` against a few lines of Python, and what must never happen to a token."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import commit
from tests.kernels import naive
from tests.kernels.support import Draw, Target

MASK = 99
NUM_SLOTS = 30
DUMMY = NUM_SLOTS - 1


class Step:
    """Random tables, and a step over some of their slots, with many equal confidences."""

    def __init__(self, target: Target, seed: int, num_rows: int, block_length: int) -> None:
        draw = Draw(target, seed)
        self.masked = draw.integers(0, 3, NUM_SLOTS, block_length) > 0
        self.masked[DUMMY] = False
        self.tokens = draw.integers(0, 50, NUM_SLOTS, block_length).masked_fill(self.masked, MASK)
        self.draft = draw.integers(300, 400, NUM_SLOTS, block_length)
        self.slots = draw.permutation(DUMMY)[:num_rows]
        self.candidate = draw.integers(100, 200, num_rows, block_length)
        self.best = draw.integers(200, 300, num_rows, block_length)
        self.confidence = draw.integers(0, 9, num_rows, block_length).float() / 8
        self.quota = draw.integers(0, block_length + 2, num_rows)
        thresholds = torch.tensor([float("inf"), 0.9, 0.5, 0.0], device=target.device)
        self.threshold = thresholds[draw.integers(0, 4, NUM_SLOTS)]
        self.window: torch.Tensor | None = None

    def run(self, rows: list[int] | None = None) -> torch.Tensor:
        """The step over all rows or some."""
        chosen = slice(None) if rows is None else rows
        return commit(
            self.tokens,
            self.masked,
            self.draft,
            self.slots[chosen],
            self.best[chosen],
            self.candidate[chosen],
            self.confidence[chosen],
            self.quota[chosen],
            self.threshold,
            self.window,
        )


@pytest.mark.parametrize("windows", [False, True], ids=["one_window", "windows"])
@pytest.mark.parametrize("block_length", [1, 4, 5, 8, 16, 32, 64])
def test_commits_what_the_definition_says(target: Target, block_length: int, windows: bool) -> None:
    step = Step(target, block_length, 24, block_length)
    if windows:
        # of every size, numbered with gaps, in columns of a wider table
        steps = Draw(target, 77).integers(0, 3, NUM_SLOTS, block_length + 3)
        step.window = steps.cumsum(1)[:, 3:]
    step.masked[step.slots[0]] = False
    step.confidence[3, ::2] = float("nan")
    tokens, masked, draft = step.tokens.clone(), step.masked.clone(), step.draft.clone()
    report = step.run()
    assert report.shape == (24, block_length + 1) and report.dtype == torch.int64
    for row, slot in enumerate(step.slots.tolist()):
        chosen, expected_status = naive.commit_lane(
            masked[slot].tolist(),
            step.confidence[row].tolist(),
            int(step.quota[row]),
            float(step.threshold[slot]),
            None if step.window is None else step.window[slot].tolist(),
        )
        tokens[slot, chosen] = step.candidate[row, chosen]
        masked[slot, chosen] = False
        draft[slot] = torch.where(masked[slot], step.best[row], tokens[slot])
        assert int(report[row, 0]) == expected_status
        assert torch.equal(report[row, 1:], torch.where(masked[slot], -1 - draft[slot], tokens[slot]))
    # Slots that no row names are among those that must not have changed.
    assert torch.equal(step.tokens, tokens)
    assert torch.equal(step.masked, masked)
    assert torch.equal(step.draft, draft)


def test_padding_rows_on_one_slot_are_harmless(target: Target) -> None:
    step, alone = Step(target, 12, 6, 32), Step(target, 12, 6, 32)
    step.slots[2:5] = DUMMY
    step.confidence[3] = float("nan")
    report = step.run()
    expected = alone.run([0, 1, 5])
    assert torch.equal(report[[0, 1, 5]], expected)
    assert torch.equal(step.tokens[DUMMY], alone.tokens[DUMMY])
    assert not step.masked[DUMMY].any()
    for row in (2, 3, 4):
        assert report[row].tolist() == [0, *alone.tokens[DUMMY].tolist()]


def test_nan_at_a_committed_position_is_no_error(target: Target) -> None:
    step = Step(target, 7, 4, 16)
    step.masked[:, 5] = False
    step.confidence[:, 5] = float("nan")
    assert (step.run()[:, 0] >= 0).all()


def test_a_mask_token_that_was_committed_stays(target: Target) -> None:
    step = Step(target, 8, 6, 16)
    step.tokens[:, 3], step.masked[:, 3] = MASK, False
    step.quota.fill_(16)
    report = step.run()
    assert (report[:, 0] == 0).all()
    assert (step.tokens[:, 3] == MASK).all()
    assert (report[:, 4] == MASK).all()


def test_quotas_finish_a_block_in_as_many_steps(target: Target) -> None:
    step = Step(target, 9, 5, 32)
    step.masked[step.slots] = True
    step.quota.fill_(8)
    step.threshold.fill_(float("inf"))
    assert [step.run()[:, 0].tolist() for _ in range(5)] == [[left] * 5 for left in (24, 16, 8, 0, 0)]
    assert torch.equal(step.tokens[step.slots], step.candidate)
    assert torch.equal(step.draft[step.slots], step.candidate)


def test_windows_are_finished_in_order(target: Target) -> None:
    step = Step(target, 13, 5, 32)
    step.masked[step.slots] = True
    step.quota.fill_(3)
    step.threshold.fill_(float("inf"))
    sizes = torch.tensor([1, 7, 8, 16], device=target.device)
    step.window = torch.arange(4, device=target.device).repeat_interleave(sizes).expand(NUM_SLOTS, -1)
    left = [step.run()[:, 0].tolist() for _ in range(13)]
    expected = [31, 28, 25, 24, 21, 18, 16, 13, 10, 7, 4, 1, 0]
    assert left == [[n] * 5 for n in expected]


def test_rows_do_not_see_each_other(target: Target) -> None:
    together, alone = Step(target, 10, 8, 16), Step(target, 10, 8, 16)
    report = together.run()
    for row in range(8):
        assert torch.equal(alone.run([row])[0], report[row])
    assert torch.equal(together.tokens, alone.tokens)
    assert torch.equal(together.masked, alone.masked)
    assert torch.equal(together.draft, alone.draft)


def test_no_rows_is_no_work(target: Target) -> None:
    step, before = Step(target, 11, 4, 8), Step(target, 11, 4, 8)
    assert step.run([]).shape == (0, 9)
    assert torch.equal(step.tokens, before.tokens)


def test_shapes_that_disagree_are_refused() -> None:
    target = Target("cpu", torch.float32, "torch", 0.0, 0)
    step = Step(target, 11, 4, 8)
    step.quota = step.quota[:3]
    with pytest.raises(ValueError, match=r"quota \(3,\).*4 rows"):
        step.run()
    step.candidate = step.candidate[:, :7]
    with pytest.raises(ValueError, match=r"candidate \(4, 7\)"):
        step.run()
    step.window = step.tokens[:, :7]
    step.quota, step.candidate = torch.ones(4, dtype=torch.int64), step.best
    with pytest.raises(ValueError, match=r"window \(30, 7\)"):
        step.run()
    step.draft = step.draft[:3]
    with pytest.raises(ValueError, match=r"draft \(3, 8\)"):
        step.run()

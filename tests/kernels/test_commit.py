"""`commit` against a few lines of Python, and what must never happen to a token."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import commit
from tests.kernels import naive
from tests.kernels.support import Draw, Target

MASK = 99


class Lanes:
    """Random lanes with many equal confidences."""

    def __init__(self, target: Target, seed: int, num_lanes: int, block_length: int) -> None:
        draw = Draw(target, seed)
        self.masked = draw.integers(0, 3, num_lanes, block_length) > 0
        self.tokens = draw.integers(0, 50, num_lanes, block_length).masked_fill(self.masked, MASK)
        self.candidate = draw.integers(100, 200, num_lanes, block_length)
        self.confidence = draw.integers(0, 9, num_lanes, block_length).float() / 8
        self.quota = draw.integers(0, block_length + 2, num_lanes).int()
        thresholds = torch.tensor([float("inf"), 0.9, 0.5, 0.0], device=target.device)
        self.threshold = thresholds[draw.integers(0, 4, num_lanes)]

    def run(self) -> torch.Tensor:
        return commit(self.tokens, self.masked, self.candidate, self.confidence, self.quota, self.threshold)


@pytest.mark.parametrize("block_length", [1, 4, 5, 8, 16, 32, 64])
def test_commits_what_the_definition_says(target: Target, block_length: int) -> None:
    lanes = Lanes(target, block_length, 24, block_length)
    lanes.masked[0] = False
    lanes.confidence[3, ::2] = float("nan")
    tokens, masked = lanes.tokens.clone(), lanes.masked.clone()
    status = lanes.run()
    assert status.dtype == torch.int32
    for lane in range(24):
        chosen, expected_status = naive.commit_lane(
            masked[lane].tolist(),
            lanes.confidence[lane].tolist(),
            int(lanes.quota[lane]),
            float(lanes.threshold[lane]),
        )
        tokens[lane, chosen] = lanes.candidate[lane, chosen]
        masked[lane, chosen] = False
        assert int(status[lane]) == expected_status
    assert torch.equal(lanes.tokens, tokens)
    assert torch.equal(lanes.masked, masked)


def test_nan_at_a_committed_position_is_no_error(target: Target) -> None:
    lanes = Lanes(target, 7, 4, 16)
    lanes.masked[:, 5] = False
    lanes.confidence[:, 5] = float("nan")
    assert (lanes.run() >= 0).all()


def test_a_mask_token_that_was_committed_stays(target: Target) -> None:
    lanes = Lanes(target, 8, 6, 16)
    lanes.tokens[:, 3], lanes.masked[:, 3] = MASK, False
    lanes.quota.fill_(16)
    assert (lanes.run() == 0).all()
    assert (lanes.tokens[:, 3] == MASK).all()


def test_quotas_finish_a_block_in_as_many_steps(target: Target) -> None:
    lanes = Lanes(target, 9, 5, 32)
    lanes.masked.fill_(True)
    lanes.quota.fill_(8)
    lanes.threshold.fill_(float("inf"))
    assert [lanes.run().tolist() for _ in range(5)] == [[left] * 5 for left in (24, 16, 8, 0, 0)]
    assert torch.equal(lanes.tokens, lanes.candidate)


def test_lanes_do_not_see_each_other(target: Target) -> None:
    together, alone = Lanes(target, 10, 8, 16), Lanes(target, 10, 8, 16)
    together.run()
    for lane in range(8):
        one = slice(lane, lane + 1)
        commit(
            alone.tokens[one],
            alone.masked[one],
            alone.candidate[one],
            alone.confidence[one],
            alone.quota[one],
            alone.threshold[one],
        )
    assert torch.equal(together.tokens, alone.tokens)
    assert torch.equal(together.masked, alone.masked)


def test_shapes_that_disagree_are_refused() -> None:
    lanes = Lanes(Target("cpu", torch.float32, "torch", 0.0, 0), 11, 4, 8)
    lanes.quota = lanes.quota[:3]
    with pytest.raises(ValueError, match=r"quota \(3,\).*4 lanes"):
        lanes.run()
    lanes.candidate = lanes.candidate[:, :7]
    with pytest.raises(ValueError, match=r"candidate \(4, 7\)"):
        lanes.run()

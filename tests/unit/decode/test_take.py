"""Candidates on a canvas, their ranks, and what a step takes of them."""

from __future__ import annotations

import pytest
import torch

from herald.decode import Take, candidates, request_generator, taken
from herald.decode.take import CHUNK_ROWS, Rank
from herald.sampling_params import SamplingParams

GREEDY = SamplingParams()
VALUES = torch.tensor([0.5, 0.9, 0.7, 0.9, 0.1, 0.8])
ALL = torch.ones(6, dtype=torch.bool)


def positions(take: Take, masked: torch.Tensor = ALL) -> list[int]:
    return taken(VALUES, masked, take).nonzero()[:, 0].tolist()


def test_best_first_and_the_lower_position_on_ties() -> None:
    assert positions(Take(1, 1)) == [1]
    assert positions(Take(2, 2)) == [1, 3]
    assert positions(Take(3, 3)) == [1, 3, 5]
    assert positions(Take(6, 6)) == [0, 1, 2, 3, 4, 5]
    assert positions(Take(0, 0)) == []


def test_only_masked_positions_are_taken() -> None:
    masked = torch.tensor([True, False, True, False, True, False])
    assert positions(Take(1, 1), masked) == [2]
    assert positions(Take(3, 3), masked) == [0, 2, 4]
    assert positions(Take(6, 6), masked) == [0, 2, 4]
    assert positions(Take(6, 1, 0.0), masked) == [0, 2, 4]
    assert positions(Take(6, 6), torch.zeros(6, dtype=torch.bool)) == []


def test_a_floor_is_reached_by_its_equal_and_the_least_go_without() -> None:
    assert positions(Take(6, 1, float(VALUES[5]))) == [1, 3, 5]
    assert positions(Take(6, 1, 0.95)) == [1]
    assert positions(Take(6, 2, 0.95)) == [1, 3]
    assert positions(Take(2, 1, 0.0)) == [1, 3]


def test_floors_by_place_end_the_run_at_the_first_that_fails() -> None:
    assert positions(Take(6, 1, (2.0, 0.9, 0.95, 0.0, 0.0, 0.0))) == [1, 3]
    assert positions(Take(3, 1, (2.0, 0.0, 0.0))) == [1, 3, 5]


def test_first_only() -> None:
    assert positions(Take(1, 1, first_only=True)) == [0]
    masked = ALL.clone()
    masked[0] = False
    assert positions(Take(1, 1, first_only=True), masked) == []


@pytest.mark.parametrize("rank", ["confidence", "entropy", "margin"])
def test_values_are_those_of_the_whole_vocabulary(rank: Rank) -> None:
    logits = torch.randn(CHUNK_ROWS + 3, 40, generator=torch.Generator().manual_seed(1)) * 3
    probability = logits.softmax(-1)
    ordered = probability.sort(-1, descending=True).values
    expected = {
        "confidence": ordered[:, 0],
        "entropy": (probability * (probability + 1e-10).log()).sum(-1),
        "margin": ordered[:, 0] - ordered[:, 1],
    }[rank]
    found = candidates(logits, rank, 39, GREEDY, None)
    unmasked = logits.argmax(-1) != 39
    assert unmasked.sum() > 10
    torch.testing.assert_close(found.value[unmasked], expected[unmasked])
    assert torch.equal(found.tokens[unmasked], logits.argmax(-1)[unmasked])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_no_candidate(temperature: float) -> None:
    logits = torch.zeros(200, 8)
    logits[:, 5] = 50.0
    kept = logits.clone()
    params = SamplingParams(temperature=temperature)
    found = candidates(logits, "confidence", 5, params, request_generator("cpu", 0))
    assert 5 not in found.tokens.tolist()
    assert (found.value < 1e-9).all()  # it counts in the probabilities
    assert torch.equal(logits, kept)
    if temperature == 0:
        assert found.tokens.tolist() == [0] * 200


def test_logits_that_are_not_finite_have_no_value() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2], logits[2, 3] = float("nan"), float("inf")
    for rank in ("confidence", "entropy", "margin"):
        value = candidates(logits, rank, 7, GREEDY, None).value
        assert value.isnan().tolist() == [False, True, True], rank

"""Candidates and confidences: greedy truth, distributions, filters, independence."""

from __future__ import annotations

import pytest
import torch

from herald.decode import draw, request_generator
from herald.sampling_params import SamplingParams

# ids in an order that is not that of their probability; probabilities .5 .2 .15 .1 .05
PROBABILITIES = torch.tensor([0.1, 0.5, 0.05, 0.2, 0.15])
DRAWS = 20_000
GREEDY = SamplingParams(temperature=0.0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frequencies(params: SamplingParams, probabilities: torch.Tensor = PROBABILITIES) -> torch.Tensor:
    tokens, _ = draw(probabilities.log().expand(DRAWS, -1), params, generator(1))
    return tokens.bincount(minlength=len(probabilities)) / DRAWS


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    possible = expected > 0
    assert torch.all(found[~possible] == 0)
    return (DRAWS * (found - expected)[possible] ** 2 / expected[possible]).sum().item()


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -1.0]])
    tokens, _ = draw(logits, GREEDY)
    assert tokens.tolist() == [1, 0, 0] and tokens.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_confidence_is_the_softmax_probability(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 50, generator=generator(0)).to(dtype) * 3
    tokens, confidence = draw(logits, GREEDY)
    expected = logits.float().softmax(-1)
    assert confidence.dtype == torch.float32
    assert torch.allclose(confidence, expected.amax(-1), atol=1e-6)
    assert torch.equal(tokens, expected.argmax(-1))


def test_confidence_ignores_temperature_and_filters() -> None:
    params = SamplingParams(temperature=3.0, top_k=2, top_p=0.6)
    tokens, confidence = draw(PROBABILITIES.log().expand(100, -1), params, generator(0))
    assert torch.allclose(confidence, PROBABILITIES[tokens], atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_give_a_nan_confidence(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    _, confidence = draw(logits, SamplingParams(temperature=temperature), generator(0))
    assert confidence.isnan().tolist() == [False, True]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_distribution_follows_temperature(temperature: float) -> None:
    expected = (PROBABILITIES.log() / temperature).softmax(-1)
    # 18.5 is the 99.9 % bound for four degrees of freedom
    assert chi_square(frequencies(SamplingParams(temperature=temperature)), expected) < 18.5


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.45}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.8}, [1, 3, 4]),
        # the nucleus is taken of what top_k leaves: .5/.7 and .2/.7
        ({"top_k": 2, "top_p": 0.71}, [1]),
        ({"top_k": 2, "top_p": 0.72}, [1, 3]),
    ],
)
def test_filters_keep_what_they_say(options: dict[str, float], kept: list[int]) -> None:
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    assert chi_square(frequencies(SamplingParams(temperature=1.0, **options)), expected) < 18.5


def test_top_k_counts_ties_from_the_lowest_id() -> None:
    found = frequencies(SamplingParams(temperature=1.0, top_k=2), torch.full((4,), 0.25))
    assert torch.all(found[:2] > 0.4) and torch.all(found[2:] == 0)


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-9])
def test_the_smallest_share_keeps_the_most_probable(top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    token, _ = draw(PROBABILITIES.log().repeat(50, 1), params, generator(0))
    assert token.unique().tolist() == [1]


def test_small_temperature_is_greedy() -> None:
    logits = torch.randn(20, 50, generator=generator(5)) * 100
    tokens, _ = draw(logits, SamplingParams(temperature=1e-30), generator(0))
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_request_draws_the_same_in_any_batch() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(3, 8, 40, generator=generator(2))
    alone = [draw(step, params, own)[0] for own in [generator(7)] for step in logits]
    ours, theirs = generator(7), generator(8)
    among = []
    for step in logits:
        draw(torch.randn(4, 40), params, theirs)
        among.append(draw(step, params, ours)[0])
        torch.rand(100)
    assert all(torch.equal(a, b) for a, b in zip(alone, among, strict=True))
    assert not torch.equal(alone[0], draw(logits[0], params, generator(8))[0])


def test_steps_of_a_request_differ() -> None:
    params, own = SamplingParams(temperature=1.0), generator(7)
    logits = torch.zeros(8, 1000)
    assert not torch.equal(draw(logits, params, own)[0], draw(logits, params, own)[0])


def test_greedy_takes_nothing_from_the_generator() -> None:
    own = generator(7)
    before = own.get_state()
    draw(torch.randn(4, 10), GREEDY, own)
    assert torch.equal(own.get_state(), before)


def test_a_seed_counts_with_all_its_bits() -> None:
    base = 0x1234_5678_9ABC_DEF0
    seeds = [base, 0, *(base ^ 1 << bit for bit in range(63)), *(1 << bit for bit in range(63))]
    first = [torch.rand(4, generator=request_generator("cpu", seed)) for seed in seeds]
    again = [torch.rand(4, generator=request_generator("cpu", seed)) for seed in seeds]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(values.tolist()) for values in first}) == len(seeds)


def test_a_short_seed_is_that_of_torch() -> None:
    for seed in (0, 1, 2**32 - 1):
        assert torch.equal(request_generator("cpu", seed).get_state(), generator(seed).get_state())


@pytest.mark.gpu
def test_cuda_takes_the_whole_seed() -> None:
    assert request_generator("cuda", 2**63 - 1).initial_seed() == 2**63 - 1


@pytest.mark.gpu
def test_cuda_draws_the_distribution() -> None:
    logits = PROBABILITIES.log().expand(DRAWS, -1).cuda()
    own = torch.Generator("cuda").manual_seed(1)
    tokens, confidence = draw(logits, SamplingParams(temperature=1.0, top_k=3), own)
    expected = PROBABILITIES.clone()
    expected[[0, 2]] = 0
    found = tokens.cpu().bincount(minlength=5) / DRAWS
    assert chi_square(found, expected / expected.sum()) < 18.5
    assert torch.allclose(confidence.cpu(), PROBABILITIES[tokens.cpu()], atol=1e-6)

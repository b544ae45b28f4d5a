"""The entropy bound and its noise: acceptance, schedule, stop, and that noise is even and repeatable."""

from __future__ import annotations

import pytest
import torch

from herald.decode import NoisePolicy, NoiseRules, advance, policy_for, policy_of, uniform_noise
from herald.decode.entropy_bound import accepted
from herald.errors import InvalidOption
from herald.models import PRESETS, read_config
from herald.models.dense import canvas_logits
from herald.models.noise_config import NoiseConfig
from herald.sampling_params import SamplingParams
from herald_kernels import entropy_softmax
from tests.support.golden import GOLDEN, Tapes, decode_cases, golden_model

FOLDER = "diffusion_gemma"
CASES = [case for _, case in decode_cases(FOLDER)]


def rules(
    steps: int = 4,
    bound: float = 1.0,
    stop: float = 0.5,
    t_min: float = 0.4,
    t_max: float = 0.8,
    stable: int = 1,
) -> NoiseRules:
    floats = (torch.tensor([value]) for value in (bound, stop, t_min, t_max))
    return NoiseRules(torch.tensor([steps]), *floats, torch.tensor([stable]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_published_steps(case: dict) -> None:
    """The policy alone, on logits of the plain forward."""
    model, params, size = golden_model(FOLDER), case["params"], case["params"]["canvas_length"]
    tapes, seed = Tapes(FOLDER, CASES), torch.tensor([CASES.index(case)])
    prefix, expected = list(case["prompt_ids"]), iter(case["steps"])
    known = rules(
        params["max_denoising_steps"], params["entropy_bound"], params["confidence_threshold"],
        params["t_min"], params["t_max"], params["stability_threshold"],
    )  # fmt: skip
    for canvas in range(1 + case["steps"][-1]["canvas"]):
        step, stable, left, signal = torch.tensor([0]), torch.tensor([0]), 1, None
        position = torch.tensor([len(case["prompt_ids"]) + canvas * size])
        tokens = before = tapes(seed, position, step, size, 0)
        while left:
            _, logits = canvas_logits(model, torch.tensor(prefix), tokens[0], signal)
            temperature = known.temperature(step).repeat(size)
            best, entropy, shares = entropy_softmax(logits, temperature, torch.float32)
            signal = model.soft_embedding(shares)
            noise = tapes(seed, position, step + 1, size, 0)
            made = advance(known, step, best[None], before, stable, best[None], entropy[None], noise)
            tokens, stable, left, before = made.tokens, made.stable, int(made.left), best[None]
            step = step + 1
            published = next(expected)
            assert (published["canvas"], published["step"]) == (canvas, int(step))
            assert best.tolist() == published["argmax"]
            assert tokens[0].tolist() == published["next_canvas" if left else "argmax"]
        prefix += tokens[0].tolist()
    assert next(expected, None) is None


def test_positions_are_accepted_by_rising_entropy_until_the_sum_before_exceeds_the_bound() -> None:
    entropy = torch.tensor([[0.5, 0.125, 2.0, 0.25], [3.0, 2.0, 4.0, 5.0]])
    # sums before, in rising order: 0, 0.125, 0.375, 0.875
    assert accepted(entropy, torch.tensor([0.375, 0.1])).tolist() == [
        [True, True, False, True],
        [False, True, False, False],
    ]
    assert accepted(entropy, torch.tensor([0.875, 100.0])).all()


def test_the_temperature_falls_towards_its_least() -> None:
    found = [rules(4).temperature(torch.tensor([step])).item() for step in range(4)]
    assert found == pytest.approx([0.8, 0.7, 0.6, 0.5])


def step_of(
    known: NoiseRules, step: int, stable: int, same: bool, entropy: float
) -> tuple[int, int, list[int]]:
    best = torch.tensor([[1, 2]])
    before = best if same else torch.tensor([[1, 3]])
    at = torch.tensor([step])
    noise, draws = torch.tensor([[8, 9]]), torch.tensor([[5, 6]])
    entropies = torch.tensor([[entropy, entropy + 0.1]])
    made = advance(known, at, best, before, torch.tensor([stable]), draws, entropies, noise)
    return int(made.left), int(made.stable), made.tokens[0].tolist()


def test_a_canvas_ends_when_it_is_stable_and_certain_or_out_of_steps() -> None:
    known = rules(steps=4, bound=0.05, stop=0.5)
    assert step_of(known, 1, 0, same=False, entropy=0.1) == (2, 0, [5, 9])
    assert step_of(known, 1, 0, same=True, entropy=0.6) == (2, 1, [5, 9])
    assert step_of(known, 1, 0, same=True, entropy=0.1) == (0, 1, [1, 2])
    assert step_of(known, 0, 0, same=True, entropy=0.1) == (3, 0, [5, 9])  # there is no step before
    assert step_of(known, 3, 0, same=False, entropy=9.0) == (0, 0, [1, 2])
    assert step_of(known, 1, 0, same=True, entropy=float("nan"))[0] == -1
    twice = rules(steps=9, stop=0.5, stable=2)
    assert step_of(twice, 1, 0, same=True, entropy=0.1)[:2] == (7, 1)
    assert step_of(twice, 2, 1, same=True, entropy=0.1)[:2] == (0, 2)
    assert step_of(twice, 2, 1, same=False, entropy=0.1)[:2] == (6, 0)
    assert step_of(rules(steps=9, stable=0), 0, 0, same=False, entropy=0.1)[0] == 0
    assert step_of(rules(steps=9, stop=0.0), 4, 3, same=True, entropy=0.0)[0] == 4


def test_noise_is_even_repeatable_and_a_function_of_all_it_is_given() -> None:
    seeds = torch.arange(400) * 7919 + 2**61
    zeros = torch.zeros_like(seeds)
    first = uniform_noise(seeds, zeros + 100, zeros, 64, 50)
    counts = first.flatten().bincount(minlength=50).float()
    assert first.shape == (400, 64) and len(counts) == 50
    assert (counts - counts.mean()).abs().max() < 6 * counts.mean().sqrt()
    assert torch.equal(first[7:9], uniform_noise(seeds[7:9], zeros[:2] + 100, zeros[:2], 64, 50))
    for other in (
        uniform_noise(seeds + 1, zeros + 100, zeros, 64, 50),
        uniform_noise(seeds, zeros + 100, zeros + 1, 64, 50),
        uniform_noise(seeds, zeros + 164, zeros, 64, 50),
    ):
        assert abs((other == first).float().mean().item() - 1 / 50) < 0.005
    # a token belongs to its position, wherever its canvas begins
    assert torch.equal(uniform_noise(seeds, zeros + 101, zeros, 63, 50), first[:, 1:])


def test_settings_are_the_checkpoints_but_for_what_a_request_brings() -> None:
    policy = policy_for(read_config(GOLDEN / FOLDER))
    assert isinstance(policy, NoisePolicy) and policy.blocks_from_prompt
    assert policy.rules(SamplingParams()) == NoiseConfig()
    mine = SamplingParams(denoising_steps=7, entropy_bound=0.3, stop_entropy=0.0)
    assert policy.rules(mine) == NoiseConfig(max_steps=7, entropy_bound=0.3, stop_entropy=0.0)
    assert policy.quotas(8, mine) == [1] * 7 and policy.is_certain(mine)
    assert len(policy.quotas(8, SamplingParams())) == 48 and not policy.is_certain(SamplingParams())


@pytest.mark.parametrize("options", [{"entropy_bound": 0.2}, {"stop_entropy": 0.0}])
def test_families_with_masks_know_no_entropies(options: dict[str, float]) -> None:
    for family in {config.family for config in PRESETS.values() if config.noise is None}:
        with pytest.raises(InvalidOption, match=f"{next(iter(options))}=.*DiffusionGemma"):
            policy_of(family).check(SamplingParams(**options))


@pytest.mark.parametrize("wrong", [{"entropy_bound": 0.0}, {"stop_entropy": -0.1}])
def test_entropies_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        SamplingParams(**wrong)

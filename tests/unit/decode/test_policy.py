"""What each family's authors decode with."""

from __future__ import annotations

import pytest

from herald.decode import policy_of
from herald.decode.policy import POLICIES
from herald.errors import InvalidOption
from herald.models.registry import FAMILIES
from herald.sampling_params import SamplingParams


def test_every_family_has_a_policy() -> None:
    for family in FAMILIES:
        assert policy_of(family.name).name == family.policy
    assert all(name == policy.name for name, policy in POLICIES.items())


@pytest.mark.parametrize("family", ["sdar", "sdar_moe"])
def test_sdar_takes_the_steps_it_is_given(family: str) -> None:
    policy = policy_of(family)
    assert policy.quotas(8, SamplingParams(max_tokens=2, denoising_steps=4)) == [2, 2, 2, 2]
    assert policy.quotas(8, SamplingParams(max_tokens=2)) == [1] * 8


@pytest.mark.parametrize(
    ("max_tokens", "steps", "expected"),
    [
        (100, 0, [1] * 8),
        (100, 4, [2] * 4),
        (5, 0, [2, 2, 2, 1, 1]),
        (5, 8, [2, 2, 2, 1, 1]),
        (5, 2, [4, 4]),
        (1, 0, [8]),
    ],
)
def test_llada2_takes_no_more_steps_than_tokens(max_tokens: int, steps: int, expected: list[int]) -> None:
    params = SamplingParams(max_tokens=max_tokens, denoising_steps=steps)
    assert policy_of("llada2_moe").quotas(8, params) == expected


def test_edited_blocks_commit_one_position_at_least() -> None:
    params = SamplingParams(max_tokens=3, editing_threshold=0.5)
    assert policy_of("llada2_moe").quotas(8, params) == [1] * 8


@pytest.mark.parametrize(
    ("block_length", "sub_block", "whole", "led"),
    [
        (32, 0, (8, 8, 8, 8), (1, 7, 8, 8, 8)),
        (8, 0, (8,), (1, 7)),
        (4, 0, (4,), (1, 3)),
        (8, 4, (4, 4), (1, 3, 4)),
        (4, 1, (1, 1, 1, 1), (1, 1, 1, 1)),
        (1, 0, (1,), (1,)),
    ],
)
def test_sub_blocks_of_fast_dllm(
    block_length: int, sub_block: int, whole: tuple[int, ...], led: tuple[int, ...]
) -> None:
    policy, params = policy_of("fast_dllm_v2"), SamplingParams(sub_block_length=sub_block)
    assert policy.windows(block_length, params) == whole
    assert policy.windows(block_length, params, leads=True) == led
    assert policy.quotas(block_length, params) == [1] * block_length


def test_only_fast_dllm_has_sub_blocks() -> None:
    params = SamplingParams(sub_block_length=4)
    policy_of("fast_dllm_v2").check(params)
    for family in ("sdar", "llada2_moe"):
        assert policy_of(family).windows(8, SamplingParams()) == (8,)
        with pytest.raises(InvalidOption, match=r"sub_block_length=4.*use 0"):
            policy_of(family).check(params)


def test_only_llada2_edits() -> None:
    params = SamplingParams(editing_threshold=0.0)
    policy_of("llada2_moe").check(params)
    for family in ("sdar", "sdar_moe", "llada", "llada_moe", "dream"):
        policy_of(family).check(SamplingParams())
        with pytest.raises(InvalidOption, match=r"editing_threshold=0\.0.*LLaDA2\.1"):
            policy_of(family).check(params)


@pytest.mark.parametrize(
    "wrong", [{"editing_threshold": 1.5}, {"editing_threshold": -0.1}, {"max_post_steps": -1}]
)
def test_editing_options_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]

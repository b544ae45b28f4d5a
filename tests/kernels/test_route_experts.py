"""`route_experts` against one token at a time in float64, and its choices among equals."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import route_experts
from tests.kernels import naive
from tests.kernels.support import TRITON, Draw, Target, on, relative_error

WIDTH = 48

# experts, top_k, score, groups, top groups, normalise, scale, bias
CASES = [
    (16, 4, "sigmoid", 4, 2, True, 2.5, True),
    (64, 8, "sigmoid", 8, 4, True, 2.5, True),
    (256, 8, "sigmoid", 8, 4, True, 2.5, True),
    (16, 2, "sigmoid", 8, 1, False, 1.0, False),
    (12, 3, "sigmoid", 1, 1, True, 1.0, True),
    (8, 2, "softmax", 1, 1, True, 1.0, False),
    (128, 8, "softmax", 1, 1, True, 1.0, False),
    (20, 20, "softmax", 1, 1, False, 1.0, False),
    (3, 1, "softmax", 1, 1, False, 0.5, True),
]


def options(case: tuple) -> dict:
    names = ("score", "num_groups", "top_groups", "normalise", "scale")
    return dict(zip(names, case[2:7], strict=True))


def inputs(target: Target, case: tuple, tokens: int) -> tuple:
    draw = Draw(target, case[0] + tokens)
    hidden, weight = draw.normal(tokens, WIDTH), draw.normal(case[0], WIDTH) / 4
    bias = 0.3 * torch.randn(case[0], generator=draw.generator).to(target.device)
    return hidden, weight, bias if case[7] else None


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["", "float32 weight"])
def test_chooses_what_the_definition_says(target: Target, case: tuple, wide: bool) -> None:
    hidden, weight, bias = inputs(target, case, 37)
    if wide:
        # 16 bits more than bfloat16 holds
        weight = weight.float() * (1 + 2.0**-12)
    ids, weights = route_experts(hidden, weight, bias, case[1], **options(case))
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for token in range(37):
        chosen, shares = naive.route_token(hidden[token], weight, bias, case[1], **options(case))
        assert ids[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(shares, rel=2e-5)


@on(TRITON)
def test_float32_weights_beside_narrow_hidden_states(target: Target) -> None:
    """What a weight holds beyond 16 bits counts, also where the hidden states are narrow."""
    draw = Draw(Target(target.device, torch.float32, target.backend, 0.0, 0), 5)
    hidden, weight = draw.normal(33, 64).half(), draw.normal(32, 64) / 4
    ids, weights = route_experts(hidden, weight, None, 4, score="softmax")
    rounded = route_experts(hidden, weight.half(), None, 4, score="softmax")[1]
    expected = [naive.route_token(token, weight, None, 4, "softmax", 1, 1, True, 1.0) for token in hidden]
    assert ids.tolist() == [chosen for chosen, _ in expected]
    shares = torch.tensor([share for _, share in expected], device=target.device)
    assert relative_error(weights, shares) < 1e-6 < relative_error(rounded, shares)


def test_bias_joins_the_choice_only(target: Target) -> None:
    hidden, weight, _ = inputs(target, CASES[0], 9)
    bias = torch.zeros(16, device=target.device)
    bias[[3, 7]] = 10.0
    ids, weights = route_experts(hidden, weight, bias, 2, score="sigmoid", normalise=False)
    scores = torch.sigmoid(hidden.float() @ weight.float().T)
    assert sorted(set(ids.flatten().tolist())) == [3, 7]
    assert relative_error(weights, scores.gather(1, ids.long())) < 1e-5


def test_lowest_id_and_first_group_win_among_equals(target: Target) -> None:
    hidden = torch.ones(5, WIDTH, device=target.device, dtype=target.dtype)
    weight = torch.zeros(16, WIDTH, device=target.device, dtype=target.dtype)
    ids, weights = route_experts(hidden, weight, None, 4, score="sigmoid", num_groups=4, top_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3]] * 5
    assert weights.tolist() == [[0.25] * 4] * 5
    weight[9] = weight[13] = 1.0  # the third and the fourth group
    ids, _ = route_experts(hidden, weight, None, 4, score="sigmoid", num_groups=4, top_groups=2)
    assert ids.tolist() == [[9, 13, 8, 10]] * 5


def test_a_group_is_as_good_as_its_two_best(target: Target) -> None:
    hidden = torch.ones(1, WIDTH, device=target.device, dtype=target.dtype)
    weight = torch.full((16, WIDTH), -1.0, device=target.device, dtype=target.dtype)
    weight[0] = 0.0625  # the best expert stands alone in its group
    weight[5] = weight[6] = 0.03125
    ids, _ = route_experts(hidden, weight, None, 2, score="sigmoid", num_groups=4, top_groups=1)
    assert ids.tolist() == [[5, 6]]


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_nan_gives_valid_experts_and_nan_weights(target: Target, case: tuple) -> None:
    hidden, weight, bias = inputs(target, case, 4)
    clean_ids, clean = route_experts(hidden, weight, bias, case[1], **options(case))
    hidden[2, 7] = float("nan")
    ids, weights = route_experts(hidden, weight, bias, case[1], **options(case))
    assert ids.min() >= 0 and ids.max() < case[0]
    assert len(set(ids[2].tolist())) == case[1]
    assert weights[2].isnan().all()
    kept = [0, 1, 3]
    assert torch.equal(ids[kept], clean_ids[kept]) and torch.equal(weights[kept], clean[kept])


def test_tokens_do_not_see_each_other(target: Target) -> None:
    hidden, weight, bias = inputs(target, CASES[1], 40)
    ids, weights = route_experts(hidden, weight, bias, 8, **options(CASES[1]))
    some_ids, some = route_experts(hidden[5:18], weight, bias, 8, **options(CASES[1]))
    assert torch.equal(some_ids, ids[5:18])
    assert relative_error(some, weights[5:18]) < 1e-6


def test_strided_tokens_and_none(target: Target) -> None:
    hidden, weight, bias = inputs(target, CASES[0], 12)
    ids, _ = route_experts(hidden, weight, bias, 4, **options(CASES[0]))
    assert torch.equal(route_experts(hidden[::2], weight, bias, 4, **options(CASES[0]))[0], ids[::2])
    assert route_experts(hidden[:0], weight, bias, 4, **options(CASES[0]))[0].shape == (0, 4)


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight = torch.zeros(3, 8), torch.zeros(16, 8)
    with pytest.raises(ValueError, match=r"weight \(16, 7\)"):
        route_experts(hidden, weight[:, :7], None, 2, score="softmax")
    with pytest.raises(ValueError, match=r"torch.float64"):
        route_experts(hidden, weight.double(), None, 2, score="softmax")
    with pytest.raises(ValueError, match=r"bias \(15,\)"):
        route_experts(hidden, weight, torch.zeros(15), 2, score="softmax")
    with pytest.raises(ValueError, match="score='tanh'"):
        route_experts(hidden, weight, None, 2, score="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_groups=3"):
        route_experts(hidden, weight, None, 2, score="sigmoid", num_groups=3)
    with pytest.raises(ValueError, match="top_k=5 must be 1 to 4"):
        route_experts(hidden, weight, None, 5, score="sigmoid", num_groups=4, top_groups=1)

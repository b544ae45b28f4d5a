"""`qk_norm_rope` against one head of one token at a time, and against rotations that undo each other."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import qk_norm_rope
from tests.kernels import naive
from tests.kernels.support import Draw, Target, relative_error

EPS = 1e-6


class Case:
    """Random input for T = groups * length tokens, and outputs filled with NaN."""

    def __init__(
        self,
        target: Target,
        groups: int,
        length: int,
        heads: int,
        kv_heads: int,
        dim: int,
        half: int,
        norm: bool,
    ) -> None:
        draw = Draw(target, 7 * length + heads + dim)
        tokens = groups * length
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = draw.normal(tokens, (heads + 2 * kv_heads) * dim)
        self.q_weight = draw.normal(dim) if norm else None
        self.k_weight = draw.normal(dim) if norm else None
        angle = draw.normal(tokens, half).float() * 5
        self.cos, self.sin = angle.cos(), angle.sin()
        self.q_out = torch.full_like(draw.normal(tokens, heads, dim), float("nan"))
        # A view into something larger, as the arena's staging rows are.
        store = torch.full((groups, kv_heads, length + 3, 2 * dim), float("nan"))
        self.store = store.to(target.device, target.dtype)
        self.rows_out = self.store[:, :, 2 : 2 + length]

    def run(self) -> None:
        qk_norm_rope(
            self.qkv,
            self.q_weight,
            self.k_weight,
            self.cos,
            self.sin,
            self.q_out,
            self.rows_out,
            self.heads,
            self.kv_heads,
            EPS,
        )

    def rows_by_token(self) -> torch.Tensor:
        """[T, kv_heads, 2 * dim]."""
        return self.rows_out.transpose(1, 2).flatten(0, 1)


SHAPES = [
    # groups, length, query heads, KV heads, head_dim, rotary pairs, norm
    (2, 4, 4, 2, 16, 8, True),
    (1, 5, 3, 1, 32, 8, False),
    (3, 7, 2, 2, 64, 32, True),
    (1, 1, 8, 1, 128, 12, True),
    (5, 1, 4, 4, 128, 64, False),
    (5, 130, 3, 1, 32, 16, True),
    (2, 32, 4, 2, 128, 32, True),
    (3, 300, 2, 1, 64, 16, True),
    (1, 9, 2, 1, 16, 4, False),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_definition(target: Target, shape: tuple[int, int, int, int, int, int, bool]) -> None:
    case = Case(target, *shape)
    case.run()
    heads = case.qkv.unflatten(1, (-1, case.dim))
    rows = case.rows_by_token()
    q_expected, k_expected = torch.zeros_like(case.q_out, dtype=torch.float64), []
    for token in range(heads.shape[0]):
        cos, sin = case.cos[token], case.sin[token]
        for head in range(case.heads):
            q_expected[token, head] = naive.norm_rope(heads[token, head], case.q_weight, cos, sin, EPS)
        for head in range(case.kv_heads):
            key = heads[token, case.heads + head]
            k_expected.append(naive.norm_rope(key, case.k_weight, cos, sin, EPS))
    assert relative_error(case.q_out, q_expected) < target.bound
    keys = rows[..., : case.dim]
    assert relative_error(keys, torch.stack(k_expected).reshape(keys.shape)) < target.bound
    assert torch.equal(rows[..., case.dim :], heads[:, case.heads + case.kv_heads :])


def test_nothing_outside_the_view_is_written(target: Target) -> None:
    case = Case(target, 3, 5, 4, 2, 32, 16, True)
    case.run()
    assert case.store[:, :, :2].isnan().all()
    assert case.store[:, :, 7:].isnan().all()
    assert not case.rows_out.isnan().any()


def test_partial_rotation_passes_the_rest_through(target: Target) -> None:
    case = Case(target, 1, 6, 2, 1, 64, 10, False)
    case.run()
    heads = case.qkv.unflatten(1, (-1, 64))
    assert torch.equal(case.q_out[..., 20:], heads[:, :2, 20:])


def test_phase_keeps_the_length_of_a_head(target: Target) -> None:
    case = Case(target, 1, 33, 4, 2, 64, 32, False)
    case.run()
    before = case.qkv.unflatten(1, (-1, 64))[:, :4].double().norm(dim=-1)
    assert relative_error(case.q_out.double().norm(dim=-1), before) < target.bound


def test_tokens_do_not_see_each_other(target: Target) -> None:
    whole = Case(target, 1, 19, 4, 2, 32, 16, True)
    whole.run()
    q_out, rows = whole.q_out.clone(), whole.rows_out.clone()
    part = Case(target, 1, 19, 4, 2, 32, 16, True)
    part.qkv, part.cos, part.sin = part.qkv[6:17], part.cos[6:17], part.sin[6:17]
    part.q_out, part.rows_out = part.q_out[6:17], part.rows_out[:, :, 6:17]
    part.run()
    assert torch.equal(part.q_out, q_out[6:17])
    assert torch.equal(part.rows_out, rows[:, :, 6:17])


def test_norm_rounds_like_the_transformers_reference(target: Target) -> None:
    """The normalised value is rounded to the dtype before the weight multiplies it."""
    case = Case(target, 1, 40, 4, 2, 64, 32, True)
    case.cos.fill_(1.0)
    case.sin.fill_(0.0)
    case.run()
    heads = case.qkv.unflatten(1, (-1, 64))[:, :4].float()
    inverse = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPS)
    expected = case.q_weight * (heads * inverse).to(target.dtype)
    # A last-bit difference of the reciprocal root may flip a rounding here and there, not often.
    different = (case.q_out != expected).float().mean()
    assert different < (0.02 if target.dtype == torch.bfloat16 else 1.0)
    assert relative_error(case.q_out, expected) < 1e-3


def test_shapes_that_disagree_are_refused() -> None:
    target = Target("cpu", torch.float32, "torch", 0.0, 0)
    case = Case(target, 2, 4, 4, 2, 16, 8, True)
    case.rows_out = case.rows_out[:1]
    with pytest.raises(ValueError, match="cannot take 8 tokens"):
        case.run()
    case = Case(target, 2, 4, 4, 2, 16, 8, True)
    case.q_weight = case.q_weight.double()
    with pytest.raises(ValueError, match="norm weight"):
        case.run()
    case = Case(target, 2, 4, 4, 2, 16, 9, True)
    with pytest.raises(ValueError, match="at most 8"):
        case.run()
    case.q_out = case.q_out[:, :3]
    with pytest.raises(ValueError, match="does not match q_out"):
        case.run()

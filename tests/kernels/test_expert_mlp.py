"""`expert_mlp` against one token at a time in float64, with every way in which tokens may meet experts."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import expert_mlp
from herald_kernels.ops import tiles
from tests.kernels import naive
from tests.kernels.support import CUDA, TRITON, Draw, Target, on, relative_error


class Case:
    """Random weights and hidden states; ``ids`` are set by the test."""

    def __init__(self, target: Target, tokens: int, experts: int, top_k: int, width: int, size: int) -> None:
        draw = Draw(target, tokens + experts + width)
        self.hidden = draw.normal(tokens, width)
        self.gate_up = draw.normal(experts, 2 * size, width) / width**0.5
        self.down = draw.normal(experts, width, size) / size**0.5
        self.residual = draw.normal(tokens, width)
        self.weights = torch.rand(tokens, top_k, generator=draw.generator).to(target.device)
        scores = torch.rand(tokens, experts, generator=draw.generator)
        self.ids = scores.topk(top_k).indices.to(target.device, torch.int32)

    def run(self, rows: slice = slice(None)) -> torch.Tensor:
        out = self.residual[rows].clone()
        ids, weights = self.ids[rows].contiguous(), self.weights[rows].contiguous()
        expert_mlp(self.hidden[rows], ids, weights, self.gate_up, self.down, out)
        return out

    def expected(self) -> torch.Tensor:
        parts = [
            naive.expert_mlp_token(self.hidden[t], ids, weights, self.gate_up, self.down)
            for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist(), strict=True))
        ]
        return self.residual.double() + torch.stack(parts)


SHAPES = [
    # tokens, experts, top_k, width, size
    (1, 4, 1, 16, 16),
    (1, 16, 4, 48, 16),
    (7, 16, 4, 48, 16),
    (37, 8, 2, 48, 24),
    (33, 5, 3, 100, 40),
    (70, 3, 2, 32, 80),
    (5, 40, 8, 64, 32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(target: Target, shape: tuple[int, int, int, int, int]) -> None:
    case = Case(target, *shape)
    assert relative_error(case.run(), case.expected()) < 2 * target.bound


@pytest.mark.parametrize("expert", [0, 2, 5])
def test_all_tokens_to_one_expert(target: Target, expert: int) -> None:
    case = Case(target, 41, 6, 1, 48, 32)
    case.ids.fill_(expert)
    assert relative_error(case.run(), case.expected()) < 2 * target.bound


def test_experts_without_tokens_are_not_read(target: Target) -> None:
    case = Case(target, 20, 9, 2, 48, 32)
    case.ids = torch.where(case.ids % 2 == 0, 3, 7).to(torch.int32)
    expected = case.expected()
    unused = [e for e in range(9) if e not in (3, 7)]
    case.gate_up[unused] = float("nan")
    case.down[unused] = float("nan")
    assert relative_error(case.run(), expected) < 2 * target.bound


@pytest.mark.parametrize("tokens", [15, 16, 17, 32, 33])
def test_tiles_that_are_just_full(target: Target, tokens: int) -> None:
    """One expert has a tile's worth of tokens or one more or less, the next one has one token."""
    case = Case(target, tokens + 1, 4, 1, 32, 16)
    case.ids.fill_(1)
    case.ids[tokens // 2] = 2
    assert relative_error(case.run(), case.expected()) < 2 * target.bound


def test_one_expert_twice_counts_twice(target: Target) -> None:
    case = Case(target, 6, 4, 2, 32, 16)
    case.ids.fill_(2)
    assert relative_error(case.run(), case.expected()) < 2 * target.bound


@on(TRITON)
def test_tokens_do_not_see_each_other(target: Target) -> None:
    """Other neighbours, other choices of theirs and another place: the same bits."""
    case = Case(target, 24, 8, 2, 48, 32)
    before = case.run()
    case.hidden[12:] += 1.0
    case.ids[12:] = 5
    assert torch.equal(case.run()[:12], before[:12])
    turned = [*range(1, 24), 0]
    case = Case(target, 24, 8, 2, 48, 32)
    for name in ("hidden", "ids", "weights", "residual"):
        setattr(case, name, getattr(case, name)[turned])
    assert torch.equal(case.run(), before[turned])


def test_nan_stays_with_its_token(target: Target) -> None:
    case = Case(target, 20, 4, 2, 48, 32)
    before = case.run()
    case.hidden[3] = float("nan")
    after = case.run()
    assert after[3].isnan().all()
    others = [t for t in range(20) if t != 3]
    assert torch.equal(after[others], before[others])


def test_strided_rows_and_none(target: Target) -> None:
    case = Case(target, 10, 4, 2, 32, 16)
    wide = torch.zeros(10, 64, device=target.device, dtype=target.dtype)
    wide[:, 32:] = case.residual
    source = torch.cat([case.hidden, case.hidden], 1)
    expert_mlp(source[:, 32:], case.ids, case.weights, case.gate_up, case.down, wide[:, 32:])
    assert torch.equal(wide[:, 32:], case.run())
    assert not wide[:, :32].any()
    assert case.run(slice(0, 0)).shape == (0, 32)


@on(CUDA)
@pytest.mark.parametrize("tokens", [1, 32, 640, 4096])
def test_released_shapes(target: Target, tokens: int) -> None:
    """The tiles of every size of batch, against the reference on the same device."""
    from herald_kernels.ops.expert_mlp import reference

    case = Case(target, tokens, 64, 8, 512, 256)
    expected = case.residual.clone()
    reference.expert_mlp(case.hidden, case.ids, case.weights, case.gate_up, case.down, expected)
    assert relative_error(case.run(), expected) < 2 * target.bound


def test_what_does_not_fit_is_refused() -> None:
    case = Case(Target("cpu", torch.float32, "torch", 0.0, 0), 6, 4, 2, 32, 16)
    case.ids = case.ids.long()
    with pytest.raises(ValueError, match="torch.int64"):
        case.run()
    case.ids = case.ids.int()[:, :1].contiguous()
    with pytest.raises(ValueError, match=r"ids \(6, 1\)"):
        case.run()
    case.down = case.down[:, :, :15]
    with pytest.raises(ValueError, match=r"down \(4, 32, 15\)"):
        case.run()
    case = Case(Target("cpu", torch.float32, "torch", 0.0, 0), 6, 4, 2, 32, 16)
    case.gate_up = case.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="gate_up must be contiguous"):
        case.run()


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_into_smaller_devices(shared: int) -> None:
    """A device with less shared memory takes smaller ones."""
    rows = []
    for pairs in (1, 5, 20, 50, 80, 200, 5000):
        gate_up, down = tiles.expert_tiles(pairs, torch.bfloat16, shared)
        assert max(tiles.product_bytes(gate_up, 2), tiles.product_bytes(down, 1)) <= shared
        assert gate_up.rows == down.rows
        rows.append(gate_up.rows)
    assert rows[-1] == (128 if shared == 227 << 10 else 64)


def test_a_device_without_room_for_any_tile_is_named() -> None:
    with pytest.raises(ValueError, match="no tile of expert_mlp fits into 1,024 bytes"):
        tiles.expert_tiles(5, torch.bfloat16, 1024)

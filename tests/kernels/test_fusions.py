"""`rms_norm` and `silu_mul` against float64, row by row and value by value."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import rms_norm, silu_mul
from tests.kernels.support import Draw, Target, relative_error


@pytest.mark.parametrize("width", [1, 48, 100, 1024, 4096])
def test_rms_norm_matches_float64(target: Target, width: int) -> None:
    draw = Draw(target, width)
    hidden, weight = 3 * draw.normal(7, width), draw.normal(width)
    out = rms_norm(hidden, weight, 1e-5)
    wide = hidden.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert out.dtype == target.dtype
    assert relative_error(out, expected) < target.bound


def test_rms_norm_of_zeros_is_zero(target: Target) -> None:
    zeros = torch.zeros(3, 64, device=target.device, dtype=target.dtype)
    assert torch.equal(rms_norm(zeros, torch.ones_like(zeros[0]), 1e-6), zeros)


def test_rms_norm_of_strided_rows(target: Target) -> None:
    draw = Draw(target, 1)
    wide, weight = draw.normal(5, 100), draw.normal(64)
    part = rms_norm(wide[:, 20:84], weight, 1e-6)
    assert part.is_contiguous()
    assert relative_error(part, rms_norm(wide[:, 20:84].contiguous(), weight, 1e-6)) < target.bound


@pytest.mark.parametrize("width", [1, 40, 1024, 3000])
def test_silu_mul_matches_float64(target: Target, width: int) -> None:
    gate_up = 4 * Draw(target, width).normal(6, 2 * width)
    out = silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert out.dtype == target.dtype
    assert relative_error(out, gate * torch.sigmoid(gate) * up) < target.bound


def test_silu_mul_of_large_gates(target: Target) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=target.device)
    assert silu_mul(gate_up).tolist() == [[0.0, 0.0, 400.0, 2e4]]


def test_silu_mul_of_strided_rows(target: Target) -> None:
    wide = Draw(target, 2).normal(5, 300)
    assert torch.equal(silu_mul(wide[:, 50:250]), silu_mul(wide[:, 50:250].contiguous()))


def test_rows_do_not_see_each_other(target: Target) -> None:
    draw = Draw(target, 3)
    hidden, weight = draw.normal(9, 256), draw.normal(256)
    normed, gated = rms_norm(hidden, weight, 1e-6), silu_mul(hidden)
    for row in range(9):
        assert torch.equal(rms_norm(hidden[row : row + 1], weight, 1e-6), normed[row : row + 1])
        assert torch.equal(silu_mul(hidden[row : row + 1]), gated[row : row + 1])


def test_no_rows(target: Target) -> None:
    hidden = Draw(target, 4).normal(0, 8)
    assert rms_norm(hidden, torch.ones_like(hidden[:0].sum(0)), 1e-6).shape == (0, 8)
    assert silu_mul(hidden).shape == (0, 4)


def test_shapes_that_disagree_are_refused() -> None:
    hidden = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        rms_norm(hidden, torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match=r"torch.float64"):
        rms_norm(hidden, torch.zeros(8).double(), 1e-6)
    with pytest.raises(ValueError, match="even width"):
        silu_mul(hidden[:, :7])
    with pytest.raises(ValueError, match="gate_up has stride"):
        silu_mul(hidden.T.contiguous().T)

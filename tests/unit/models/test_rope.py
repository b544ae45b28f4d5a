"""Rotary frequencies against values of the published formulas, and the angles' float arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from herald.models.rope import RopeScaling, RotaryEmbedding, inverse_frequencies, read_rope

CPU = torch.device("cpu")
YARN = RopeScaling("yarn", 4.0, 32768)


def test_plain_frequencies() -> None:
    inverse, factor = inverse_frequencies(128, 1e6, None)
    expected = [1e6 ** (-2 * pair / 128) for pair in range(64)]
    assert inverse.dtype == torch.float32 and factor == 1.0
    assert torch.allclose(inverse, torch.tensor(expected), rtol=1e-6, atol=0)


def test_linear_divides_every_frequency() -> None:
    plain, _ = inverse_frequencies(128, 1e6, None)
    scaled, factor = inverse_frequencies(128, 1e6, RopeScaling("linear", 4.0, 32768))
    assert torch.equal(scaled, plain / 4) and factor == 1.0


def test_yarn_keeps_fast_and_stretches_slow_frequencies() -> None:
    plain, _ = inverse_frequencies(128, 1e6, None)
    scaled, factor = inverse_frequencies(128, 1e6, YARN)
    # pairs 23 to 40 turn between 32 times and once over 32768 positions
    assert torch.equal(scaled[:24], plain[:24])
    assert torch.allclose(scaled[40:], plain[40:] / 4, rtol=1e-6, atol=0)
    assert torch.all(scaled[24:40] < plain[24:40]) and torch.all(scaled[24:40] > plain[24:40] / 4)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_blend_matches_transformers() -> None:
    """Values of transformers 5.24 for head_dim 128, theta 1e6, factor 4 over 32768 positions."""
    scaled, _ = inverse_frequencies(128, 1e6, YARN)
    expected = {
        0: 1.0,
        23: 0.006978305988013744,
        26: 0.0031684227287769318,
        30: 0.0010643609566614032,
        35: 0.0002462583943270147,
        39: 6.490394298452884e-05,
        63: 3.102344408034696e-07,
    }
    for pair, value in expected.items():
        assert scaled[pair].item() == pytest.approx(value, rel=1e-6)


def test_attention_factor_reaches_cosines() -> None:
    scaling = RopeScaling("yarn", 4.0, 32768, attention_factor=2.0)
    cos, sin = RotaryEmbedding(8, 1e4, scaling, CPU)(torch.tensor([0]))
    assert torch.equal(cos, torch.full((1, 4), 2.0)) and torch.equal(sin, torch.zeros(1, 4))


def test_angles_are_float32_products() -> None:
    rotary = RotaryEmbedding(64, 1e6, None, CPU)
    positions = torch.tensor([0, 1, 131071, 999_999])
    cos, sin = rotary(positions)
    assert cos.shape == sin.shape == (4, 32) and cos.dtype == torch.float32
    angle = positions[2].float() * rotary.inverse_frequencies[3]
    assert cos[2, 3] == angle.cos() and sin[2, 3] == angle.sin()


def test_mscale_pair_sets_the_attention_factor() -> None:
    table = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "rope_theta": 1e4}
    theta, scaling = read_rope({"rope_parameters": table}, 4096)
    assert theta == 1e4 and scaling is not None and scaling.original_max_positions == 4096
    expected = (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)
    assert scaling.attention_factor == pytest.approx(expected)


def test_missing_factor_is_the_ratio_of_positions() -> None:
    table = {"type": "yarn", "original_max_position_embeddings": 32768}
    _, scaling = read_rope({"rope_theta": 1e6, "rope_scaling": table}, 131072)
    assert scaling is not None and scaling.factor == 4.0

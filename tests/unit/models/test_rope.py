"""Rotary frequencies against values of the published formulas, and the angles' float arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from herald.errors import InvalidOption
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


TABLES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_own_length": {"rope_type": "yarn", "factor": 2.0},
    "yarn_everything": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn_not_truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies_are_those_of_transformers(name: str, spelling: str) -> None:
    """Both spellings of a configuration, through transformers' own classes."""
    if spelling == "rope_parameters" and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 does not know rope_parameters")
    raw: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 131072}
    if spelling == "rope_scaling":
        raw |= {"rope_theta": 1e6, "rope_scaling": dict(TABLES[name])}
    else:
        raw["rope_parameters"] = {"rope_theta": 1e6, **TABLES[name]}
    theta, scaling = read_rope(raw, 131072)
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**raw))
    found, factor = inverse_frequencies(128, theta, scaling)
    assert torch.allclose(found, rotary.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(rotary.attention_scaling)
    positions = torch.tensor([[0, 1, 31, 4097, 100_000]])
    expected_cos, expected_sin = rotary(torch.zeros(1), positions)
    cos, sin = RotaryEmbedding(128, theta, scaling, CPU)(positions[0])
    # a frequency that differs in its last bit moves position 100,000 by a hundredth of a radian
    assert torch.allclose(cos, expected_cos[0, :, :64], atol=0.02)
    assert torch.allclose(sin, expected_sin[0, :, :64], atol=0.02)


def test_an_option_replaces_the_scaling_of_a_checkpoint() -> None:
    raw = {"rope_theta": 1e6}
    assert read_rope(raw, 32768, "yarn:4") == (1e6, YARN)
    assert read_rope(raw, 32768, "linear:2") == (1e6, RopeScaling("linear", 2.0, 32768))
    stored = {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}}
    assert read_rope(raw | stored, 16384, "yarn:8") == (1e6, RopeScaling("yarn", 8.0, 8192))
    table = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert read_rope(table, 4096, "linear:1.5") == (5e5, RopeScaling("linear", 1.5, 4096))


@pytest.mark.parametrize(
    "text", ["yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:nan", "yarn:inf", "ntk:2", ":2"]
)
def test_an_unknown_extension_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"rope_scaling=.*'yarn:4'"):
        read_rope({"rope_theta": 1e6}, 32768, text)

"""Logits of the families with full attention against the published code, and what the comparison notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from herald.errors import InvalidOption
from herald.models import load_model, read_config
from herald.models.config import read_json
from herald.models.decoder import DecoderModel
from herald.models.rope import RotaryEmbedding
from tests.support.golden import FULL_FOLDERS, GOLDEN, LOGITS_TOLERANCE, full_model, tensors


def error(model: DecoderModel, folder: str, sequence: str) -> float:
    """Largest difference to the expected logits."""
    expected = tensors(folder)[f"{sequence}.logits"]
    found = model.dense_logits(tensors(folder)[f"{sequence}.input_ids"])
    assert found.shape == expected.shape and found.dtype == torch.float32
    return (found.cpu() - expected).abs().max().item()


def load(folder: str, device: str = "cpu") -> DecoderModel:
    model = full_model(folder, device)
    assert isinstance(model, DecoderModel)
    return model


@pytest.mark.parametrize("folder", FULL_FOLDERS)
@pytest.mark.parametrize("sequence", ["seq1", "seq2"])
def test_logits_match_the_published_code(folder: str, sequence: str) -> None:
    assert error(load(folder), folder, sequence) < LOGITS_TOLERANCE


def drop(field: str) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        for layer in model.layers:
            assert getattr(layer, field) is not None
            setattr(layer, field, None)

    return change


def flat_norm(field: str) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        for layer in model.layers:
            getattr(layer, field).fill_(1.0)

    return change


def drop_final_norm(model: DecoderModel) -> None:
    model.final_norm.fill_(1.0)


def drop_bias_of(part: int) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        config = model.config
        sizes = [heads * config.head_dim for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
        for layer in model.layers:
            assert layer.qkv_bias is not None
            layer.qkv_bias.split(sizes)[part].zero_()

    return change


def make_block_causal(model: DecoderModel) -> None:
    model.config = dataclasses.replace(model.config, full_attention=False, block_length=8)


def drop_rope(model: DecoderModel) -> None:
    model.rotary.inverse_frequencies.zero_()


def rotate_half_of_each_head(model: DecoderModel) -> None:
    model.rotary = RotaryEmbedding(model.config.head_dim // 2, model.config.rope_theta, None, model.device)


def change_theta(model: DecoderModel) -> None:
    model.rotary = RotaryEmbedding(model.config.head_dim, model.config.rope_theta / 100, None, model.device)


def swap_gate_and_up(model: DecoderModel) -> None:
    for layer in model.layers:
        if layer.experts is not None:
            layer.experts.gate_up = torch.cat(layer.experts.gate_up.chunk(2, dim=1)[::-1], dim=1)
        else:
            assert layer.gate_up is not None
            layer.gate_up = torch.cat(layer.gate_up.chunk(2)[::-1])


def change_moe(**changes: object) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        assert model.config.moe is not None
        model.config = dataclasses.replace(model.config, moe=dataclasses.replace(model.config.moe, **changes))

    return change


EVERY = {
    "input_norm": flat_norm("input_norm"),
    "mlp_norm": flat_norm("mlp_norm"),
    "final_norm": drop_final_norm,
    "block_causal": make_block_causal,
    "no_rope": drop_rope,
    "half_rope": rotate_half_of_each_head,
    "theta": change_theta,
    "gate_and_up": swap_gate_and_up,
}
MUTATIONS = [
    *((folder, name, change) for folder in FULL_FOLDERS for name, change in EVERY.items()),
    ("llada_moe", "no_q_norm", drop("q_norm")),
    ("llada_moe", "no_k_norm", drop("k_norm")),
    ("llada_moe", "renormalised", change_moe(normalise=True)),
    ("llada_moe", "one_expert_less", change_moe(experts_per_token=2)),
    ("llada_moe", "sigmoid", change_moe(score="sigmoid")),
    ("dream", "no_q_bias", drop_bias_of(0)),
    ("dream", "no_k_bias", drop_bias_of(1)),
    ("dream", "no_v_bias", drop_bias_of(2)),
]


@pytest.mark.parametrize(("folder", "name", "mutate"), MUTATIONS, ids=lambda value: str(value)[:24])
def test_a_wrong_forward_is_visible(folder: str, name: str, mutate: Callable[[DecoderModel], None]) -> None:
    model = load(folder)
    mutate(model)
    assert error(model, folder, "seq1") > 1.0, name


@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_bfloat16_stays_near_float32(folder: str) -> None:
    """Where it keeps the choice of experts, which random weights make on small margins."""
    model = full_model(folder, dtype=torch.bfloat16)
    expected = tensors(folder)["seq1.logits"]
    found = model.dense_logits(tensors(folder)["seq1.input_ids"])
    assert model.dtype == torch.bfloat16
    assert ((found - expected).abs().mean(-1) < 0.1 * expected.std()).float().mean() > 0.4


@pytest.mark.parametrize(
    ("folder", "key", "value"),
    [
        ("llada", "block_type", "sequential"),
        ("llada", "include_qkv_bias", True),
        ("llada", "activation_type", "gelu"),
        ("llada", "alibi", True),
        ("llada_moe", "moe_layer_freq", [0, 1]),
        ("llada_moe", "shared_expert_intermediate_size", 32),
        ("llada_moe", "clip_qkv", 8.0),
        ("dream", "use_mrope", True),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, folder: str, key: str, value: object) -> None:
    import json

    raw = read_json(GOLDEN / folder / "config.json") | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    name = "hidden_act" if key == "activation_type" else key
    with pytest.raises(InvalidOption, match=name):
        read_config(tmp_path, mask_token_id=310)


def test_released_mask_and_block_length_stand_in() -> None:
    with pytest.raises(InvalidOption, match="mask_token_id=156895"):  # of the released vocabulary
        read_config(GOLDEN / "llada_moe")
    assert load_model(GOLDEN / "llada").config.block_length == 32
    assert load_model(GOLDEN / "dream").config.block_length == 0


@pytest.mark.gpu
@pytest.mark.parametrize("folder", FULL_FOLDERS)
def test_logits_match_on_cuda(folder: str) -> None:
    assert error(load(folder, "cuda"), folder, "seq2") < LOGITS_TOLERANCE

"""Logits of Fast-dLLM v2 against the published code, and that the comparison would notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from herald.errors import InvalidOption
from herald.models.config import read_config
from herald.models.fast_dllm_v2 import FastDllmV2Model
from herald.models.rope import RotaryEmbedding
from tests.support.golden import FAST_FOLDERS, GOLDEN, LOGITS_TOLERANCE, golden_model, tensors


def load(folder: str, device: str = "cpu") -> FastDllmV2Model:
    model = golden_model(folder, device)
    assert isinstance(model, FastDllmV2Model)
    return model


def error(model: FastDllmV2Model, folder: str, sequence: str) -> float:
    """Largest difference to the expected logits."""
    expected = tensors(folder)[f"{sequence}.logits"]
    found = model.dense_logits(tensors(folder)[f"{sequence}.input_ids"])
    assert found.shape == expected.shape and found.dtype == torch.float32
    return (found.cpu() - expected).abs().max().item()


@pytest.mark.parametrize("folder", FAST_FOLDERS)
@pytest.mark.parametrize("sequence", ["seq1", "seq2"])
def test_logits_match_the_published_code(folder: str, sequence: str) -> None:
    assert error(load(folder), folder, sequence) < LOGITS_TOLERANCE


def drop_bias(part: str) -> Callable[[FastDllmV2Model], None]:
    def drop(model: FastDllmV2Model) -> None:
        kv_size = model.config.num_kv_heads * model.config.head_dim
        for layer in model.layers:
            assert layer.qkv_bias is not None
            sizes = [layer.qkv_bias.numel() - 2 * kv_size, kv_size, kv_size]
            layer.qkv_bias.split(sizes)["qkv".index(part)].zero_()

    return drop


def change_theta(model: FastDllmV2Model) -> None:
    model.rotary = RotaryEmbedding(model.config.head_dim, model.config.rope_theta / 100, None, model.device)


def make_causal(model: FastDllmV2Model) -> None:
    model.config = dataclasses.replace(model.config, block_length=1)


def swap_gate_and_up(model: FastDllmV2Model) -> None:
    for layer in model.layers:
        assert layer.gate_up is not None
        layer.gate_up = torch.cat(layer.gate_up.chunk(2)[::-1])


MUTATIONS = {
    **{f"no_{part}_bias": drop_bias(part) for part in "qkv"},
    "other_theta": change_theta,
    "causal": make_causal,
    "gate_is_up": swap_gate_and_up,
}


@pytest.mark.parametrize("folder", FAST_FOLDERS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_forward_is_visible(folder: str, name: str) -> None:
    model = load(folder)
    MUTATIONS[name](model)
    assert error(model, folder, "seq1") > 1.0


def test_tied_embeddings_are_the_head() -> None:
    model = load("fast_dllm_v2_bd8_tied")
    assert model.head is model.embedding
    untied = load("fast_dllm_v2")
    assert not torch.equal(untied.head, untied.embedding)


def test_what_a_released_checkpoint_leaves_out() -> None:
    """The released configuration names the block length ``bd_size`` and no mask token."""
    with pytest.raises(InvalidOption, match=r"mask_token_id=151665"):
        read_config(GOLDEN / "fast_dllm_v2")  # its vocabulary is scaled down
    config = read_config(GOLDEN / "fast_dllm_v2_bd8_tied", mask_token_id=310)
    assert config.shifted and config.block_length == 8 and not config.qk_norm


@pytest.mark.gpu
@pytest.mark.parametrize("folder", FAST_FOLDERS)
def test_logits_match_on_cuda(folder: str) -> None:
    assert error(load(folder, "cuda"), folder, "seq2") < LOGITS_TOLERANCE

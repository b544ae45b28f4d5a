"""Logits of the SDAR family against the published modelling code, and that the comparison would notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from herald.models import load_model
from herald.models.rope import RotaryEmbedding
from herald.models.sdar import SdarModel
from tests.support.golden import GOLDEN, LOGITS_TOLERANCE, SDAR_FOLDERS, tensors


def load(folder: str) -> SdarModel:
    model = load_model(GOLDEN / folder)
    assert isinstance(model, SdarModel)
    return model


def error(model: SdarModel, folder: str, sequence: str) -> float:
    """Largest difference to the expected logits."""
    expected = tensors(folder)[f"{sequence}.logits"]
    found = model.dense_logits(tensors(folder)[f"{sequence}.input_ids"])
    assert found.shape == expected.shape and found.dtype == torch.float32
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("folder", SDAR_FOLDERS)
@pytest.mark.parametrize("sequence", ["seq1", "seq2"])
def test_logits_match_the_published_code(folder: str, sequence: str) -> None:
    assert error(load(folder), folder, sequence) < LOGITS_TOLERANCE


@pytest.mark.parametrize("folder", SDAR_FOLDERS)
def test_logits_see_nothing_after_their_block(folder: str) -> None:
    model = load(folder)
    ids = tensors(folder)["seq1.input_ids"]
    end = 2 * model.config.block_length
    whole, prefix = model.dense_logits(ids), model.dense_logits(ids[:end])
    assert (whole[:end] - prefix).abs().max() < LOGITS_TOLERANCE


def drop_q_norm(model: SdarModel) -> None:
    for layer in model.layers:
        layer.q_norm = None


def drop_k_norm(model: SdarModel) -> None:
    for layer in model.layers:
        layer.k_norm = None


def drop_rope(model: SdarModel) -> None:
    model.rotary.inverse_frequencies.zero_()


def change_theta(model: SdarModel) -> None:
    model.rotary = RotaryEmbedding(model.config.head_dim, model.config.rope_theta / 100, None, model.device)


def make_causal(model: SdarModel) -> None:
    model.config = dataclasses.replace(model.config, block_length=1)


def make_bidirectional(model: SdarModel) -> None:
    model.config = dataclasses.replace(model.config, block_length=model.config.max_position_embeddings)


def swap_gate_and_up(model: SdarModel) -> None:
    for layer in model.layers:
        layer.gate_up = torch.cat(layer.gate_up.chunk(2)[::-1])


def swap_keys_and_values(model: SdarModel) -> None:
    size = model.config.num_kv_heads * model.config.head_dim
    for layer in model.layers:
        q, k, v = layer.qkv.split([layer.qkv.shape[0] - 2 * size, size, size])
        layer.qkv = torch.cat([q, v, k])


def halve_softmax_scale(model: SdarModel) -> None:
    model.softmax_scale /= 2


def tie_head(model: SdarModel) -> None:
    model.head = model.embedding


MUTATIONS = [
    drop_q_norm,
    drop_k_norm,
    drop_rope,
    change_theta,
    make_causal,
    make_bidirectional,
    swap_gate_and_up,
    swap_keys_and_values,
    halve_softmax_scale,
    tie_head,
]


@pytest.mark.parametrize("folder", SDAR_FOLDERS)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_wrong_forward_is_visible(folder: str, mutate: Callable[[SdarModel], None]) -> None:
    model = load(folder)
    mutate(model)
    assert error(model, folder, "seq1") > 1.0


def test_bfloat16_stays_near_float32() -> None:
    model = load_model(GOLDEN / "sdar_b4", dtype=torch.bfloat16)
    expected = tensors("sdar_b4")["seq1.logits"]
    found = model.dense_logits(tensors("sdar_b4")["seq1.input_ids"])
    assert model.dtype == torch.bfloat16
    # random weights of this size spread logits over tens; bf16 keeps 8 bits of them
    assert (found - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.gpu
@pytest.mark.parametrize("folder", SDAR_FOLDERS)
def test_logits_match_on_cuda(folder: str) -> None:
    model = load_model(GOLDEN / folder, "cuda", torch.float32)
    expected = tensors(folder)["seq2.logits"]
    found = model.dense_logits(tensors(folder)["seq2.input_ids"])
    assert found.device.type == "cuda"
    assert (found.cpu() - expected).abs().max() < LOGITS_TOLERANCE

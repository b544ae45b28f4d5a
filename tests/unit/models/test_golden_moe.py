"""Logits of the families with experts against the published code, and that the comparison would notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from herald.models.decoder import DecoderModel
from herald.models.rope import RotaryEmbedding
from tests.support.golden import LOGITS_TOLERANCE, MOE_FOLDERS, golden_model, tensors

GROUPED = "llada2_moe"


def load(folder: str) -> DecoderModel:
    model = golden_model(folder)
    assert isinstance(model, DecoderModel)
    return model


def error(model: DecoderModel, folder: str, sequence: str) -> float:
    """Largest difference to the expected logits."""
    expected = tensors(folder)[f"{sequence}.logits"]
    found = model.dense_logits(tensors(folder)[f"{sequence}.input_ids"])
    assert found.shape == expected.shape and found.dtype == torch.float32
    return (found.cpu() - expected).abs().max().item()


@pytest.mark.parametrize("folder", MOE_FOLDERS)
@pytest.mark.parametrize("sequence", ["seq1", "seq2"])
def test_logits_match_the_published_code(folder: str, sequence: str) -> None:
    assert error(load(folder), folder, sequence) < LOGITS_TOLERANCE


def change_moe(**changes: object) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        assert model.config.moe is not None
        model.config = dataclasses.replace(model.config, moe=dataclasses.replace(model.config.moe, **changes))

    return change


def each_expert_layer(change: Callable[..., None]) -> Callable[[DecoderModel], None]:
    def change_all(model: DecoderModel) -> None:
        for layer in model.layers:
            if layer.experts is not None:
                change(layer.experts)

    return change_all


def swap_gate_and_up(experts) -> None:
    experts.gate_up = torch.cat(experts.gate_up.chunk(2, dim=1)[::-1], dim=1)


def turn_experts(experts) -> None:
    experts.down = experts.down.roll(1, dims=0)


def drop_bias(experts) -> None:
    experts.router_bias = None


def drop_shared(experts) -> None:
    experts.shared_gate_up = None


def rotate_whole_heads(model: DecoderModel) -> None:
    model.rotary = RotaryEmbedding(model.config.head_dim, model.config.rope_theta, None, model.device)


BOTH = {
    "swap_gate_and_up": each_expert_layer(swap_gate_and_up),
    "turn_experts": each_expert_layer(turn_experts),
    "not_normalised": change_moe(normalise=False),
}
MUTATIONS = [
    *(("sdar_moe", name, change) for name, change in BOTH.items()),
    ("sdar_moe", "one_expert_less", change_moe(experts_per_token=1)),
    ("sdar_moe", "sigmoid", change_moe(score="sigmoid")),
    *((GROUPED, name, change) for name, change in BOTH.items()),
    (GROUPED, "one_expert_less", change_moe(experts_per_token=3)),
    (GROUPED, "softmax", change_moe(score="softmax")),
    (GROUPED, "no_groups", change_moe(num_groups=1, top_groups=1)),
    (GROUPED, "one_group_more", change_moe(top_groups=3)),
    (GROUPED, "no_scale", change_moe(scale=1.0)),
    (GROUPED, "no_bias", each_expert_layer(drop_bias)),
    (GROUPED, "no_shared_expert", each_expert_layer(drop_shared)),
    (GROUPED, "rotate_whole_heads", rotate_whole_heads),
]


@pytest.mark.parametrize(("folder", "name", "mutate"), MUTATIONS, ids=lambda value: str(value)[:24])
def test_a_wrong_forward_is_visible(folder: str, name: str, mutate: Callable[[DecoderModel], None]) -> None:
    model = load(folder)
    mutate(model)
    assert error(model, folder, "seq1") > 1.0, name


@pytest.mark.parametrize("folder", ["sdar_moe", GROUPED])
def test_bfloat16_stays_near_float32(folder: str) -> None:
    """Where it keeps the choice of experts, which random weights make on small margins."""
    model = golden_model(folder, dtype=torch.bfloat16)
    expected = tensors(folder)["seq1.logits"]
    found = model.dense_logits(tensors(folder)["seq1.input_ids"])
    assert model.dtype == torch.bfloat16
    assert ((found - expected).abs().mean(-1) < 0.1 * expected.std()).float().mean() > 0.4


def test_routers_keep_what_a_narrow_dtype_would_round() -> None:
    narrow, wide = golden_model(GROUPED, dtype=torch.bfloat16), load(GROUPED)
    assert isinstance(narrow, DecoderModel)
    experts, exact = narrow.layers[1].experts, wide.layers[1].experts
    assert experts is not None and exact is not None
    assert experts.router.dtype == torch.float32 and torch.equal(experts.router, exact.router)
    assert experts.router_bias is not None and experts.router_bias.dtype == torch.float32
    assert experts.gate_up.dtype == torch.bfloat16


def test_layers_before_the_experts_are_dense() -> None:
    model = load(GROUPED)
    assert [layer.experts is None for layer in model.layers] == [True, False, False]
    assert [layer.gate_up is None for layer in model.layers] == [False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("folder", MOE_FOLDERS)
def test_logits_match_on_cuda(folder: str) -> None:
    model = golden_model(folder, "cuda")
    assert isinstance(model, DecoderModel)
    assert error(model, folder, "seq2") < LOGITS_TOLERANCE

"""Logits of DiffusionGemma against the published code, and that the comparison would notice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from herald.errors import InvalidOption, UsageError, WeightsError
from herald.models import load_model, read_config
from herald.models.dense import canvas_logits
from herald.models.diffusion_gemma import DiffusionGemmaModel, GemmaLayer
from herald.models.noise_config import default_layer_types
from herald.models.rope import RotaryEmbedding
from herald_kernels import rms_norm
from tests.support.golden import GOLDEN, LOGITS_TOLERANCE, golden_model, tensors

FOLDER = "diffusion_gemma"
TEMPERATURE = 0.6
Change = Callable[[DiffusionGemmaModel], None]


def load(device: str = "cpu", dtype: torch.dtype = torch.float32) -> DiffusionGemmaModel:
    model = golden_model(FOLDER, device, dtype)
    assert isinstance(model, DiffusionGemmaModel)
    return model


def errors(model: DiffusionGemmaModel, sequence: str) -> tuple[float, float, float]:
    """Largest difference of the prefix's hidden states, and of the logits of both steps."""
    given = {name: tensors(FOLDER)[f"{sequence}.{name}"] for name in NAMES}

    def distance(found: torch.Tensor, name: str) -> float:
        assert found.shape == given[name].shape
        return (found.float().cpu() - given[name]).abs().max().item()

    hidden, first = canvas_logits(model, given["prefix_ids"], given["canvas1_ids"])
    before = given["self_conditioning_logits"].to(model.device).softmax(-1).to(model.dtype)
    signal = model.soft_embedding(before)
    _, second = canvas_logits(model, given["prefix_ids"], given["canvas2_ids"], signal)
    normed = rms_norm(hidden, model.final_norm, model.config.rms_norm_eps)
    return distance(normed, "encoder_hidden"), distance(first, "logits1"), distance(second, "logits2")


NAMES = (
    *("prefix_ids", "canvas1_ids", "canvas2_ids", "encoder_hidden"),
    *("logits1", "logits2", "self_conditioning_logits"),
)


@pytest.mark.parametrize("sequence", ["seq1", "seq2"])
def test_logits_match_the_published_code(sequence: str) -> None:
    assert max(errors(load(), sequence)) < LOGITS_TOLERANCE


def test_the_expected_signal_is_the_first_step_at_its_temperature() -> None:
    given = tensors(FOLDER)
    difference = given["seq2.logits1"] / TEMPERATURE - given["seq2.self_conditioning_logits"]
    assert difference.abs().max() < 1e-4


def layers(change: Callable[[GemmaLayer], None]) -> Change:
    def change_all(model: DiffusionGemmaModel) -> None:
        for layer in model.layers:
            assert isinstance(layer, GemmaLayer)
            change(layer)

    return change_all


def set_(**values: Any) -> Change:
    def change(model: DiffusionGemmaModel) -> None:
        for name, value in values.items():
            setattr(model, name, value)

    return change


def configure(**changes: Any) -> Change:
    def change(model: DiffusionGemmaModel) -> None:
        model.config = dataclasses.replace(model.config, **changes)

    return change


def window(extra: int) -> Change:
    def change(model: DiffusionGemmaModel) -> None:
        windowed = model.config.windowed
        assert windowed is not None
        wider = dataclasses.replace(windowed, window=windowed.window + extra)
        model.config = dataclasses.replace(model.config, windowed=wider)

    return change


def ones(name: str) -> Change:
    return layers(lambda layer: setattr(layer, name, torch.ones_like(getattr(layer, name))))


def no_conditioning(model: DiffusionGemmaModel) -> None:
    model.condition = lambda hidden, signal, causal: hidden  # type: ignore[method-assign]


def no_signal(model: DiffusionGemmaModel) -> None:
    known = model.condition
    model.condition = (  # type: ignore[method-assign]
        lambda hidden, signal, causal: known(hidden, torch.zeros_like(signal), causal)
    )


def plain_router(model: DiffusionGemmaModel) -> None:
    for layer in model.layers:
        assert layer.experts is not None
        layer.experts.router = layer.experts.router * model.config.hidden_size**0.5


def no_expert_scale(layer: GemmaLayer) -> None:
    assert layer.experts is not None
    layer.experts.expert_scale = None


def no_experts(layer: GemmaLayer) -> None:
    assert layer.routed_norm is not None
    layer.routed_norm = torch.zeros_like(layer.routed_norm)


def no_dense(layer: GemmaLayer) -> None:
    assert layer.dense_norm is not None
    layer.dense_norm = torch.zeros_like(layer.dense_norm)


def one_scalar(layer: GemmaLayer) -> None:
    layer.causal_scalar = layer.canvas_scalar


def slow_rope(model: DiffusionGemmaModel) -> None:
    """Frequencies over the dimensions that turn, in the place of those over the whole head."""
    turned = RotaryEmbedding(8, model.config.rope_theta, None, model.device).inverse_frequencies
    model.rotary.inverse_frequencies = torch.cat([turned, torch.zeros(12)])


def silu_experts(model: DiffusionGemmaModel) -> None:
    assert model.config.moe is not None
    model.config = dataclasses.replace(
        model.config, moe=dataclasses.replace(model.config.moe, activation="silu")
    )


MUTATIONS: dict[str, Change] = {
    "no_conditioning": no_conditioning,
    "no_signal": no_signal,
    "one_scalar": layers(one_scalar),
    "no_scalar": ones("canvas_scalar"),
    "no_embedding_scale": set_(embedding_scale=1.0),
    "no_softcap": configure(softcap=0.0),
    "slow_rope": slow_rope,
    "scaled_attention": set_(softmax_scale=16**-0.5),
    "no_dense_branch": layers(no_dense),
    "no_experts": layers(no_experts),
    "router_without_scale": plain_router,
    "no_expert_scale": layers(no_expert_scale),
    "silu_experts": silu_experts,
    "no_value_norm": set_(norm_values=False),
    "window_longer_by_one": window(1),
    "window_shorter_by_one": window(-1),
    "no_attention_norm": ones("attention_norm"),
    "no_output_norm": ones("output_norm"),
    "no_expert_norm": ones("expert_norm"),
    "no_query_norm": ones("q_norm"),
    "no_key_norm": ones("k_norm"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_forward_is_visible(name: str) -> None:
    model = load()
    MUTATIONS[name](model)
    assert max(errors(model, "seq2")[1:]) > 0.5


def test_bfloat16_stays_near_float32() -> None:
    """Where it keeps the choice of experts, which random weights make on small margins."""
    model = load(dtype=torch.bfloat16)
    given = tensors(FOLDER)
    _, found = canvas_logits(model, given["seq1.prefix_ids"], given["seq1.canvas1_ids"])
    expected = given["seq1.logits1"]
    assert ((found - expected).abs().mean(-1) < 0.1 * expected.std()).float().mean() > 0.3


def changed(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration, changed at the top (or below ``text_config``, by ``text_NAME``)."""
    raw = json.loads((GOLDEN / FOLDER / "config.json").read_text())
    for key, value in changes.items():
        target = raw["text_config"] if key.startswith("text_") else raw
        target[key.removeprefix("text_")] = value
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text((GOLDEN / FOLDER / "generation_config.json").read_text())
    return folder


def test_the_configuration_is_read() -> None:
    config = read_config(GOLDEN / FOLDER)
    assert config.noise is not None and config.windowed is not None and config.moe is not None
    assert (config.block_length, config.eos_token_ids, config.pad_token_id) == (8, (1, 106, 50), 0)
    assert (config.noise.max_steps, config.noise.entropy_bound, config.noise.stop_entropy) == (
        48,
        0.1,
        0.005,
    )
    assert (config.noise.t_min, config.noise.t_max, config.noise.stable_steps) == (0.4, 0.8, 1)
    assert [(s.num_kv_heads, s.head_dim, s.window, s.place) for s in config.attention] == [
        (2, 16, 7, 0),
        (2, 16, 7, 1),
        (1, 32, 0, 0),
    ]
    assert config.softcap == 30.0 and config.num_full_layers == 1 and config.media_token_ids == (270,)
    assert config.moe.activation == "gelu_tanh" and config.moe.experts_per_token == 2


def test_layer_types_and_shapes_may_be_left_to_their_defaults(tmp_path: Path) -> None:
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention", "full_attention"]
    assert default_layer_types(8) == types
    by_layer = {"2": {"head_dim": 64, "num_key_value_heads": 2}}
    config = read_config(changed(tmp_path, text_layer_types=None, text_per_layer_config=by_layer))
    assert config.windowed is not None and config.windowed.layers == (0, 1)
    assert (config.head_dim, config.num_kv_heads) == (64, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"text_attention_bias": True}, "attention_bias=True"),
        ({"text_use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"text_layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"text_layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types"),
        ({"text_sliding_window": 1}, "sliding_window=1"),
        ({"text_rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention='yarn'"),
        ({"text_final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption, match=named):
        read_config(changed(tmp_path, **changes))


def test_a_mask_token_is_refused() -> None:
    with pytest.raises(InvalidOption, match="mask_token_id=5"):
        load_model(GOLDEN / FOLDER, mask_token_id=5)
    with pytest.raises(UsageError, match="canvas_logits"):
        load().dense_logits(torch.tensor([1, 2]))


def test_another_sampler_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    settings = {"sampler_config": {"_cls_name": "OtherSamplerConfig"}}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidOption, match="sampler_config='OtherSamplerConfig'"):
        read_config(folder)


def test_only_known_leftovers_of_other_parts_are_tolerated(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(tmp_path)
    weights = load_file(GOLDEN / FOLDER / "model.safetensors")
    save_file(weights | {"model.encoder.other.weight": torch.zeros(1)}, folder / "model.safetensors")
    load_model(folder)
    save_file(weights | {"model.decoder.other.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected: model\.decoder\.other\.weight"):
        load_model(folder)


@pytest.mark.gpu
def test_logits_match_on_cuda() -> None:
    assert max(errors(load("cuda"), "seq2")) < LOGITS_TOLERANCE

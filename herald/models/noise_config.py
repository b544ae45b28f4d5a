"""What the configuration of a family says that denoises a canvas: its decoding, its layers with a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from herald.config import check
from herald.errors import InvalidOption
from herald.models import fields
from herald.models.rope import RopeScaling


class AttentionShape(NamedTuple):
    """Keys and values of a layer.

    Attributes:
        window: positions before its own that a token sees; 0 for all of them.
        place: index of the layer among those that see all, or among those with a window.
    """

    num_kv_heads: int
    head_dim: int
    window: int
    place: int


@dataclass(frozen=True)
class WindowLayers:
    """Layers that see the last positions only. Their rows stay on the device and are never selected.

    Attributes:
        layers: their indices, ascending.
        window: positions before its own that a token sees.
        rope_theta: of their rotary embedding.
    """

    layers: tuple[int, ...]
    window: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        check(self.window >= 1, "sliding_window", self.window + 1, "use 2 or more")
        for field in ("num_kv_heads", "head_dim"):
            check(getattr(self, field) >= 1, field, getattr(self, field), "use 1 or more")


@dataclass(frozen=True)
class NoiseConfig:
    """How a canvas of random tokens is decoded; see `herald.decode.entropy_bound`.

    The defaults are those of the released generation settings of DiffusionGemma.

    Attributes:
        max_steps: denoising steps of a canvas at most.
        entropy_bound: nats; see `herald.decode.entropy_bound`.
        t_min, t_max: temperature of the logits after the last step, and in the first.
        stop_entropy: nats; a canvas that does not change is finished below this mean entropy.
        stable_steps: steps before the last that must have had the same arg-max tokens.
    """

    max_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stop_entropy: float = 0.005
    stable_steps: int = 1

    def __post_init__(self) -> None:
        check(self.max_steps >= 1, "max_denoising_steps", self.max_steps, "use 1 or more, such as 48")
        check(self.entropy_bound > 0, "entropy_bound", self.entropy_bound, "use more than 0, such as 0.1")
        check(self.t_min >= 0, "t_min", self.t_min, "use 0 or more, such as 0.4")
        check(self.t_max >= self.t_min and self.t_max > 0, "t_max", self.t_max, "use t_min or more, above 0")
        check(self.stop_entropy >= 0, "confidence_threshold", self.stop_entropy, "use 0 or more")
        check(self.stable_steps >= 0, "stability_threshold", self.stable_steps, "use 0 or more, such as 1")


def read_noise(generation: Mapping[str, Any]) -> NoiseConfig:
    """The decoding that a ``generation_config.json`` describes.

    Raises:
        WeightsError: a field is of the wrong kind.
        InvalidOption: a value is out of range, or asks for a sampler that is not built.
    """
    sampler = fields.table(generation, "sampler_config")
    kind = sampler.get("_cls_name", "EntropyBoundSamplerConfig")
    check(
        kind == "EntropyBoundSamplerConfig", "sampler_config", kind, "use a checkpoint with the entropy bound"
    )
    usual = NoiseConfig()
    return NoiseConfig(
        max_steps=fields.integer(generation, "max_denoising_steps", usual.max_steps),
        entropy_bound=fields.number(sampler, "entropy_bound", usual.entropy_bound),
        t_min=fields.number(generation, "t_min", usual.t_min),
        t_max=fields.number(generation, "t_max", usual.t_max),
        stop_entropy=fields.number(generation, "confidence_threshold", usual.stop_entropy),
        stable_steps=fields.integer(generation, "stability_threshold", usual.stable_steps),
    )


def read_window_layers(raw: Mapping[str, Any]) -> WindowLayers | None:
    """The layers of ``layer_types`` with a window, None for none.

    Raises:
        WeightsError, InvalidOption: a field is missing, of the wrong kind or out of range.
    """
    count = fields.integer(raw, "num_hidden_layers")
    types = fields.names(raw, "layer_types") or default_layer_types(count)
    known = {"sliding_attention", "full_attention"}
    if len(types) != count or not known.issuperset(types):
        raise InvalidOption(
            f"config.json: layer_types has {len(types)} entries of {sorted(set(types))}",
            f"use {count} of {', '.join(sorted(known))}",
        )
    # the published code sees to it as well
    check(types[-1] == "full_attention", "layer_types", types[-1], "let the last layer be 'full_attention'")
    layers = tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
    if not layers:
        return None
    return WindowLayers(
        layers=layers,
        window=fields.integer(raw, "sliding_window") - 1,
        num_kv_heads=fields.integer(raw, "num_key_value_heads"),
        head_dim=fields.integer(raw, "head_dim"),
        rope_theta=_rope(raw, "sliding_attention", "default", 10_000.0)[0],
    )


def default_layer_types(count: int) -> list[str]:
    """Every sixth layer and the last one see everything."""
    last = count - 1
    return ["full_attention" if i % 6 == 5 or i == last else "sliding_attention" for i in range(count)]


def read_full_heads(raw: Mapping[str, Any]) -> tuple[int, int]:
    """(KV heads, head_dim) of the layers that see everything.

    Released files name them once for all of these layers; newer exporters name them layer by layer.
    """
    kv_heads = fields.integer(raw, "num_key_value_heads")
    kv_heads = fields.integer(raw, "num_global_key_value_heads", kv_heads)
    head_dim = fields.integer(raw, "global_head_dim", 512)
    by_layer = fields.table(raw, "per_layer_config")
    found = {
        (fields.integer(entry, "num_key_value_heads", kv_heads), fields.integer(entry, "head_dim", head_dim))
        for entry in (fields.table(by_layer, layer) for layer in by_layer)
    }
    check(len(found) < 2, "per_layer_config", sorted(found), "use one shape for all full_attention layers")
    return found.pop() if found else (kv_heads, head_dim)


def read_full_rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """(theta, frequencies) of the layers that see everything."""
    theta, share = _rope(raw, "full_attention", "proportional", 1_000_000.0)
    return theta, RopeScaling("proportional", 1.0, max_positions, share=share)


def _rope(raw: Mapping[str, Any], layers: str, kind: str, theta: float) -> tuple[float, float]:
    """(theta, share of the pairs that turn) of one type of layers, whose rotary embedding is ``kind``."""
    table = fields.table(fields.table(raw, "rope_parameters"), layers)
    found = table.get("rope_type", kind)
    check(found == kind, f"rope_parameters.{layers}", found, f"only {kind!r} is built for them")
    share = fields.number(table, "partial_rotary_factor", 0.25 if kind == "proportional" else 1.0)
    whole = 0 < share <= 1 and (kind == "proportional" or share == 1)
    check(whole, "partial_rotary_factor", share, "use a share in (0, 1], and 1 for 'default'")
    factor = fields.number(table, "factor", 1.0)
    check(factor == 1.0, "factor", factor, "only rotary embeddings that are not stretched are built")
    return fields.number(table, "rope_theta", theta), share


def kinds_of(
    num_layers: int, num_kv_heads: int, head_dim: int, windowed: WindowLayers | None
) -> tuple[AttentionShape, ...]:
    """The shape of every layer."""
    with_window: Sequence[int] = windowed.layers if windowed is not None else ()
    found: list[AttentionShape] = []
    seen = 0
    for layer in range(num_layers):
        if windowed is not None and layer in with_window:
            place = with_window.index(layer)
            found.append(AttentionShape(windowed.num_kv_heads, windowed.head_dim, windowed.window, place))
        else:
            found.append(AttentionShape(num_kv_heads, head_dim, 0, seen))
            seen += 1
    return tuple(found)

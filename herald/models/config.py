"""`ModelConfig`: what the runtime needs to know of a checkpoint, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from herald.config import check, is_whole
from herald.errors import InvalidOption, ModelNotFound, WeightsError
from herald.models.fields import integer, names, number, table, token_ids
from herald.models.fp8 import Fp8Layout, read_fp8
from herald.models.moe_config import MoeConfig, read_moe
from herald.models.noise_config import (
    AttentionShape,
    NoiseConfig,
    WindowLayers,
    kinds_of,
    read_full_heads,
    read_full_rope,
    read_noise,
    read_window_layers,
)
from herald.models.registry import Family, find_family
from herald.models.rope import RopeScaling, read_rope

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_LAYERS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a block-diffusion model and how it decodes.

    Attributes:
        family: name of the `herald.models.registry.Family` that reads it.
        num_heads, num_kv_heads: query heads, and the KV heads they share in equal groups.
        head_dim: as ``num_kv_heads`` that of the layers without a window; see `attention`.
        max_position_embeddings: positions of the training; see `max_positions` for the limit.
        qk_norm: RMSNorm on every query and key head before the rotation.
        attention_bias: biases on the query, key, value and output projections.
        block_length: positions denoised together; 0 for all of a request's output, with ``full_attention``.
        mask_token_id: the token a position holds until it is committed; of a canvas of random tokens, which
            has none, the padding token, and nobody reads it.
        eos_token_ids: any of them ends a sequence.
        dtype: of the checkpoint's weights.
        partial_rotary_factor: share of each head that is rotated, from its first dimension on.
        moe: experts in the place of MLPs, None for a dense model.
        full_attention: every position sees every position; otherwise none sees beyond its block.
        shifted: see `herald.models.registry.Family`.
        fp8: how e4m3 weights are stored, None where there are none.
        noise: how a canvas of random tokens is decoded; None for a family with a mask token. With it, the
            prompt and finished blocks are encoded causally, and blocks begin at the end of the prompt.
        windowed: layers that see the last positions only.
        softcap: logits are ``softcap * tanh(logits / softcap)``; 0 for as they are.
        media_token_ids: stand for what is no text, and cannot be prompted.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    block_length: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: torch.dtype
    partial_rotary_factor: float = 1.0
    moe: MoeConfig | None = None
    full_attention: bool = False
    shifted: bool = False
    fp8: Fp8Layout | None = None
    noise: NoiseConfig | None = None
    windowed: WindowLayers | None = None
    softcap: float = 0.0
    media_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "vocab_size",
        ):
            check(getattr(self, field) >= 1, field, getattr(self, field), "use 1 or more")
        # names of all its tensors are listed before a file is read
        check(self.num_layers <= MAX_LAYERS, "num_layers", self.num_layers, f"use 1 to {MAX_LAYERS}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"use a divisor of num_heads={self.num_heads}",
        )
        window_heads = self.windowed.num_kv_heads if self.windowed is not None else 1
        check(
            self.num_heads % window_heads == 0,
            "num_kv_heads",
            window_heads,
            f"use a divisor of num_heads={self.num_heads}",
        )
        check(self.softcap >= 0, "final_logit_softcapping", self.softcap, "use 0 for none, or more")
        check(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", self.head_dim, "use an even number")
        factor = self.partial_rotary_factor
        rotates = 0 < factor <= 1 and self.rotary_dim >= 2 and self.rotary_dim % 2 == 0
        check(rotates, "partial_rotary_factor", factor, "use a share of the head, such as 0.5 or 1.0")
        check(
            (0 if self.full_attention else 1) <= self.block_length <= self.max_position_embeddings,
            "block_length",
            self.block_length,
            "use the length the checkpoint was trained with, such as 4 or 32",
        )
        check(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"pass mask_token_id, the checkpoint's mask token in [0, {self.vocab_size})",
        )

    @cached_property
    def attention(self) -> tuple[AttentionShape, ...]:
        """Keys and values of every layer."""
        return kinds_of(self.num_layers, self.num_kv_heads, self.head_dim, self.windowed)

    @property
    def num_full_layers(self) -> int:
        """Layers without a window: those whose rows the host pool holds and a selection is made of."""
        return self.num_layers - (0 if self.windowed is None else len(self.windowed.layers))

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def max_positions(self) -> int:
        """Positions a request may use: the training's, or what the rotary scaling extends them to."""
        scaling = self.rope_scaling
        if scaling is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.original_max_positions * scaling.factor))


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file of a model folder.

    Raises:
        ModelNotFound: the file is absent.
        WeightsError: it is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{path} does not exist", "pass the folder of a complete checkpoint (config.json, *.safetensors)"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read ({error})", "download or write the file again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds {type(value).__name__}, not an object", "download the file again")
    return value


def read_config(
    path: str | Path, block_length: int = 0, mask_token_id: int | None = None, rope_scaling: str = ""
) -> ModelConfig:
    """Read ``config.json`` and, where there is one, ``generation_config.json`` of a model folder.

    Released checkpoints may name neither block length nor mask token; then the family's stand in.

    Args:
        path: model folder.
        block_length: overrides the checkpoint's, 0 to keep it.
        mask_token_id: overrides the checkpoint's, None to keep it.
        rope_scaling: ``"yarn:4"`` or ``"linear:2"`` instead of the checkpoint's, for more positions than it
            was made for; empty to keep it.

    Raises:
        ModelNotFound: there is no ``config.json``.
        UnknownArchitecture: no family reads it.
        WeightsError: a file or a field is missing or unreadable.
        InvalidOption: a value is out of range or asks for something that is not built.
    """
    folder = Path(path)
    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    check(
        is_whole(block_length) and block_length >= 0,
        "block_length",
        block_length,
        "use 0 for the checkpoint's, or a whole number",
    )
    check(
        mask_token_id is None or is_whole(mask_token_id),
        "mask_token_id",
        mask_token_id,
        "use None for the checkpoint's, or a token id",
    )
    family = find_family(names(raw, "architectures"))
    if family.text_config is not None:
        raw = {**table(raw, family.text_config), **raw}
    raw = _usual_keys(raw, family)
    _refuse_unsupported(raw, family)
    config = _shape_of(raw, generation, family, block_length, mask_token_id, rope_scaling)
    return config if family.mask_token_id is not None else _with_noise(config, raw, generation)


def _shape_of(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    family: Family,
    block_length: int,
    mask_token_id: int | None,
    rope_scaling: str,
) -> ModelConfig:
    num_heads = integer(raw, "num_attention_heads")
    hidden_size = integer(raw, "hidden_size")
    max_positions = integer(raw, "max_position_embeddings")
    pad_token_id = _either("pad_token_id", generation, raw)
    if family.mask_token_id is not None:
        num_kv_heads = integer(raw, "num_key_value_heads", num_heads)
        head_dim = integer(raw, "head_dim", hidden_size // max(num_heads, 1))
        rope_theta, scaling = read_rope(raw, max_positions, rope_scaling)
        mask = integer(raw, "mask_token_id", family.mask_token_id) if mask_token_id is None else mask_token_id
    else:
        check(
            mask_token_id is None,
            "mask_token_id",
            mask_token_id,
            f"leave it out: {family.name} has no mask token",
        )
        check(
            not rope_scaling,
            "rope_scaling",
            rope_scaling,
            f"leave it out: {family.name} is made for its positions",
        )
        num_kv_heads, head_dim = read_full_heads(raw)
        rope_theta, scaling = read_full_rope(raw, max_positions)
        mask = pad_token_id or 0
    return ModelConfig(
        family=family.name,
        num_layers=integer(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=integer(raw, "vocab_size"),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.mask_token_id is None)),
        qk_norm=family.qk_norm,
        attention_bias=bool(raw.get("attention_bias", False)),
        block_length=block_length or _block_length(raw, family),
        mask_token_id=mask,
        eos_token_ids=token_ids("eos_token_id", _either("eos_token_id", generation, raw))
        or family.eos_token_ids,
        bos_token_id=_either("bos_token_id", generation, raw),
        pad_token_id=pad_token_id,
        dtype=_dtype(raw),
        partial_rotary_factor=number({**raw, **table(raw, "rope_parameters")}, "partial_rotary_factor", 1.0),
        moe=None if family.router is None else read_moe(raw, family.router, family.activation),
        full_attention=family.full_attention,
        shifted=family.shifted,
        fp8=read_fp8(raw),
    )


def _usual_keys(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The configuration with the family's own keys under their usual names too."""
    own = {usual: raw[key] for usual, key in family.renamed if raw.get(key) is not None}
    return {**raw, **own}


def _with_noise(config: ModelConfig, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """What only a family without a mask token has."""
    check(
        config.fp8 is None,
        "quantization_config",
        raw.get("quantization_config"),
        f"use the bfloat16 checkpoint of {config.family}",
    )
    return replace(
        config,
        noise=read_noise(generation),
        windowed=read_window_layers(raw),
        softcap=number(raw, "final_logit_softcapping", 30.0),
        media_token_ids=token_ids("image_token_id", raw.get("image_token_id")),
    )


def _either(key: str, generation: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
    """What the generation settings say, else the configuration."""
    value = generation.get(key)
    return raw.get(key) if value is None else value


def _block_length(raw: Mapping[str, Any], family: Family) -> int:
    for key in family.block_length_keys:
        if raw.get(key) is not None:
            return integer(raw, key)
    return family.block_length


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype", raw.get("torch_dtype")) or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidOption(
            f"config.json: dtype={name!r} is not supported", f"use one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    for key, expected in family.fixed:
        value = raw.get(key)
        remedy = f"only checkpoints with {key}={expected!r} are supported"
        check(value is None or value == expected, key, value, remedy)
    sparse = raw.get("moe_layer_freq")
    only = isinstance(sparse, list) and any(each != 1 for each in sparse)
    check(not only, "moe_layer_freq", sparse, "only checkpoints with experts in every layer are supported")
    activation = raw.get("hidden_act", "silu")
    check(activation == "silu", "hidden_act", activation, "only 'silu' checkpoints are supported")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    check(window is None, "sliding_window", window, "use a checkpoint with use_sliding_window=false")

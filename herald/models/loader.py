"""Builds a model from a folder."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from herald.models.base import BlockModel
from herald.models.config import ModelConfig, read_config
from herald.models.registry import family_named
from herald.models.weights import Checkpoint, load_parameters


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    block_length: int = 0,
    mask_token_id: int | None = None,
    rope_scaling: str = "",
) -> BlockModel:
    """Read the checkpoint in folder ``path`` (see `herald.models.resolve.resolve_model`).

    Args:
        device: where the weights go.
        dtype: of the weights there, None for the checkpoint's.
        block_length, mask_token_id, rope_scaling: override the checkpoint's, see `read_config`.

    Raises:
        ModelNotFound, UnknownArchitecture, InvalidOption: see `read_config`.
        WeightsError: files are missing or damaged, or do not fit the configuration.
    """
    config = read_config(path, block_length, mask_token_id, rope_scaling)
    model_class = family_named(config.family).model_class()
    tensors = load_parameters(
        Checkpoint(Path(path), config.fp8),
        model_class.parameters(config),
        torch.device(device),
        dtype or config.dtype,
        model_class.tolerated(config),
    )
    return model_class(config, tensors)


def num_parameters(config: ModelConfig) -> int:
    """Weights of a model of this shape, counted without reading any."""
    parameters = family_named(config.family).model_class().parameters(config)
    return sum(math.prod(parameter.shape) for parameter in parameters)


def num_active_parameters(config: ModelConfig) -> int:
    """The weights that a token passes: of routed experts only as many as it chooses."""
    total, moe = num_parameters(config), config.moe
    if moe is None:
        return total
    layers = max(config.num_layers - moe.first_dense_layers, 0)
    expert = 3 * config.hidden_size * moe.intermediate_size
    return total - layers * (moe.num_experts - moe.experts_per_token) * expert

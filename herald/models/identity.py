"""What tells two models apart: their configurations, and a fingerprint of their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import torch

from herald.models.base import BlockModel

# Elements of a tensor that count, evenly spaced: what trains or merges a model changes nearly all of them.
SAMPLED = 4096


def model_identity(model: BlockModel) -> dict[str, Any]:
    """What a position's KV depends on beside tokens and block length, as JSON values, on every device alike.

    Returns:
        ``family``, ``dtype``, ``config`` (the fields of `ModelConfig`) and ``weights``, a hash of names,
        shapes, dtypes and a sample of the values.
    """
    config = json.loads(json.dumps(asdict(model.config), default=str))
    del config["block_length"]
    weights = hashlib.sha256()
    for name, tensor in named_tensors(vars(model), ""):
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights.update(_sample(tensor))
    return {
        "family": model.config.family,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": config,
        "weights": weights.hexdigest(),
    }


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in mappings, sequences and dataclasses, by path, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from named_tensors(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{index}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}")


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    sampled = flat[::step].contiguous().cpu()
    return sampled.view(torch.uint8).numpy().tobytes()

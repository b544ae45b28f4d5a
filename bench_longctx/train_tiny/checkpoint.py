"""Training checkpoints: weights in float32 and the optimiser's state, in three files of less than 15 MB."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .model import TinyConfig, TinySDAR
from .optimizer import MuonAdam

_WEIGHTS = ("ckpt_weights_0.safetensors", "ckpt_weights_1.safetensors")
_OPTIMIZER = "ckpt_optimizer.safetensors"


def _write(tensors: dict[str, torch.Tensor], path: Path, meta: dict[str, str]) -> None:
    partial = path.with_suffix(".partial")
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial, metadata=meta)
    os.replace(partial, path)


def save(folder: Path, model: TinySDAR, optimizer: MuonAdam, state: dict) -> None:
    """Write the complete state; `state` is kept as JSON."""
    meta = {"progress": json.dumps(state), "config": json.dumps(model.config.__dict__)}
    names = list(model.state_dict())
    half = len(names) // 2
    for file, part in zip(_WEIGHTS, (names[:half], names[half:]), strict=True):
        _write({n: model.state_dict()[n] for n in part}, folder / file, meta)
    _write(optimizer.state(), folder / _OPTIMIZER, meta)


def load_model(folder: Path) -> TinySDAR:
    """The model of a checkpoint, on the CPU, in float32."""
    with safe_open(folder / _WEIGHTS[0], "pt") as f:
        config = TinyConfig(**json.loads(f.metadata()["config"]))
    model = TinySDAR(config)
    model.load_state_dict(load_file(folder / _WEIGHTS[0]) | load_file(folder / _WEIGHTS[1]))
    return model


def progress(folder: Path) -> dict:
    """The progress that was saved."""
    with safe_open(folder / _OPTIMIZER, "pt") as f:
        return json.loads(f.metadata()["progress"])


def load_optimizer(folder: Path, optimizer: MuonAdam, steps: int) -> None:
    """Restore the optimiser's state after `steps` steps."""
    optimizer.load(load_file(folder / _OPTIMIZER), steps)

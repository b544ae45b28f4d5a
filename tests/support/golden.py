"""Reads the fixtures of ``tests/golden`` (see the README there)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden"
SDAR_FOLDERS = ("sdar_b4", "sdar_b8")
LOGITS_TOLERANCE = 2e-4


@cache
def description(folder: str) -> dict[str, Any]:
    return json.loads((GOLDEN / folder / "golden.json").read_text(encoding="utf-8"))


@cache
def tensors(folder: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / folder / "golden.safetensors")


def decode_cases(*folders: str) -> list[tuple[str, dict[str, Any]]]:
    """(folder, case) of every decode case."""
    return [(folder, case) for folder in folders for case in description(folder)["decode"]]


def case_id(value: object) -> str:
    """Test id of a parameter of `decode_cases`."""
    return value["name"] if isinstance(value, dict) else str(value)

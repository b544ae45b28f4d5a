"""Reads the fixtures of ``tests/golden`` (see the README there)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from herald.models import BlockModel, load_model

GOLDEN = Path(__file__).parents[1] / "golden"
SDAR_FOLDERS = ("sdar_b4", "sdar_b8")
LLADA2_FOLDERS = ("llada2_moe", "llada21_moe", "llada21_moe_mask_top")
MOE_FOLDERS = ("sdar_moe", *LLADA2_FOLDERS)
FAST_FOLDERS = ("fast_dllm_v2", "fast_dllm_v2_bd8_tied")
FULL_FOLDERS = ("llada", "llada_moe", "dream")
LOGITS_TOLERANCE = 2e-4


@cache
def description(folder: str) -> dict[str, Any]:
    return json.loads((GOLDEN / folder / "golden.json").read_text(encoding="utf-8"))


@cache
def tensors(folder: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / folder / "golden.safetensors")


def golden_model(
    folder: str,
    device: str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    block_length: int | None = None,
) -> BlockModel:
    """The checkpoint with the block length (or another) and the mask token of its expected results."""
    about = description(folder)
    block = about["logits"].get("B", 0) if block_length is None else block_length
    return load_model(GOLDEN / folder, device, dtype, block, about["mask_id"])


def full_model(folder: str, device: str = "cpu", dtype: torch.dtype | None = torch.float32) -> BlockModel:
    """A checkpoint with full attention, with the mask token of its expected results."""
    return load_model(GOLDEN / folder, device, dtype, mask_token_id=description(folder)["mask_id"])


def decode_cases(*folders: str) -> list[tuple[str, dict[str, Any]]]:
    """(folder, case) of every decode case."""
    return [(folder, case) for folder in folders for case in description(folder)["decode"]]


def case_id(value: object) -> str:
    """Test id of a parameter of `decode_cases`."""
    return value["name"] if isinstance(value, dict) else str(value)


class Tapes:
    """The published noise of canvases, in the place of `herald.decode.uniform_noise`.

    A request with seed i gets that of case i.
    """

    def __init__(self, folder: str, cases: list[dict[str, Any]], device: str = "cpu") -> None:
        tapes = [tensors(folder)[f"case.{case['name']}.noise"] for case in cases]
        shape = [max(tape.shape[d] for tape in tapes) for d in range(2)]
        self._tapes = torch.zeros(len(tapes), *shape, tapes[0].shape[2], dtype=torch.int64)
        for all_steps, tape in zip(self._tapes, tapes, strict=True):
            all_steps[: tape.shape[0], : tape.shape[1]] = tape
        self._tapes = self._tapes.to(device)
        self._prompts = torch.tensor([len(case["prompt_ids"]) for case in cases], device=device)

    def __call__(
        self, seed: torch.Tensor, position: torch.Tensor, step: torch.Tensor, block_length: int, _: int
    ) -> torch.Tensor:
        """See `herald.decode.Noise`. Canvases and steps beyond the tape get its last ones."""
        canvas = (position - self._prompts[seed]) // block_length
        canvas = canvas.clamp(0, self._tapes.shape[1] - 1)
        return self._tapes[seed, canvas, step.clamp(max=self._tapes.shape[2] - 1)]

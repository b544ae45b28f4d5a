"""Weights stored as e4m3 numbers with scales, and their way back to the dtype of the run.

A scale belongs to a block of a weight (DeepSeek-V3, arXiv 2412.19437, section 3.3: 128 x 128, stored as
``weight_scale_inv``), to one of its rows, or to all of it (``weight_scale``); it is what a stored number is
multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from herald.config import check, is_whole
from herald.models import fields

STORED = "F8_E4M3"  # as safetensors calls it
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # behind the weight's name
DEFAULT_BLOCK = (128, 128)
CHUNK_BYTES = 64 << 20  # of float32 numbers that are alive while a weight is converted

Granularity = Literal["tensor", "row", "block"]


@dataclass(frozen=True)
class Fp8Layout:
    """How a checkpoint stores its e4m3 weights.

    Attributes:
        block: rows and columns that share a scale, where scales belong to blocks.
    """

    block: tuple[int, int] = DEFAULT_BLOCK

    def granularity(self, weight: tuple[int, ...], scale: tuple[int, ...]) -> Granularity | None:
        """What each scale belongs to, by the two shapes; None where they do not fit together."""
        if len(weight) != 2:
            return None
        rows, columns = weight
        if scale in ((), (1,), (1, 1)):
            return "tensor"
        if scale in ((rows,), (rows, 1)):
            return "row"
        blocks = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return "block" if scale == blocks else None


def read_fp8(raw: Mapping[str, Any]) -> Fp8Layout | None:
    """The layout that a ``config.json`` describes; None where it describes no quantisation.

    Read are ``quant_method`` "fp8" (DeepSeek, Qwen, AutoFP8) and "compressed-tensors" with 8-bit floats.

    Raises:
        InvalidOption: weights are quantised in another way.
        WeightsError: the description cannot be read.
    """
    described = fields.table(raw, "quantization_config")
    if not described:
        return None
    remedy = "use the float32, float16, bfloat16 or fp8 (e4m3) checkpoint"
    method, block = described.get("quant_method"), described.get("weight_block_size")
    if method == "compressed-tensors":
        groups = fields.table(described, "config_groups")
        weights = [fields.table(fields.table(groups, name), "weights") for name in groups]
        wide = all(each.get("type") == "float" and each.get("num_bits") == 8 for each in weights)
        check(wide and bool(weights), "quantization_config", described, remedy)
        block = next((each["block_structure"] for each in weights if each.get("block_structure")), None)
    else:
        right = method == "fp8" and described.get("fmt") in (None, "e4m3", "float8_e4m3fn")
        check(right, "quantization_config", described, remedy)
    if block is None:
        return Fp8Layout()
    pair = isinstance(block, list) and len(block) == 2 and all(is_whole(each) and each >= 1 for each in block)
    check(pair, "weight_block_size", block, "restore the checkpoint's, such as [128, 128]")
    return Fp8Layout((block[0], block[1]))


def scale_name(weight: str, stored: Iterable[str]) -> str | None:
    """The name of a weight's scales among those ``stored``, None where it has none."""
    names = (weight + suffix for suffix in SCALE_SUFFIXES)
    return next((name for name in names if name in stored), None)


def input_scale_name(weight: str) -> str:
    """The name of the scale of a layer's inputs, which a forward in the run's dtype has no use for."""
    return weight.removesuffix("weight") + "input_scale"


def dequantise(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: Fp8Layout,
    place: torch.Tensor,
    chunk: int = CHUNK_BYTES,
) -> None:
    """Write ``weight * scale`` to ``place``; products are float32, rounded once to the dtype there.

    Args:
        weight: float8_e4m3fn [rows, columns], on any device.
        scale: of a shape that `Fp8Layout.granularity` knows.
        place: [rows, columns], on the device where the work is done.
        chunk: bytes of float32 numbers in one go.
    """
    rows, columns = weight.shape
    high, wide = layout.block
    kind = layout.granularity((rows, columns), tuple(scale.shape))
    assert kind is not None
    scale = scale.to(place.device, torch.float32)
    step = max(chunk // (4 * columns) // high, 1) * high
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = weight[first:last].to(place.device).float()
        if kind == "tensor":
            part *= scale.reshape(())
        elif kind == "row":
            part *= scale.reshape(rows, 1)[first:last]
        else:
            own = scale[first // high : -(-last // high)].repeat_interleave(high, 0)[: last - first]
            part *= own.repeat_interleave(wide, 1)[:, :columns]
        place[first:last].copy_(part)

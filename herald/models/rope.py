"""Rotary position embedding: frequencies (plain, linear, YaRN) and the cosines and sines of positions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from herald.config import check
from herald.errors import InvalidOption
from herald.models import fields

RopeKind = Literal["linear", "yarn", "proportional"]


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the training length are mapped.

    Attributes:
        kind: ``"linear"`` divides every frequency by ``factor``; ``"yarn"`` only the slow ones
            (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023);
            ``"proportional"`` keeps those of the first ``share`` of the pairs, and the others do not turn.
        factor: context extension, > 1 for a longer one.
        original_max_positions: positions of the training before the extension (YaRN).
        attention_factor: factor on cosines and sines; 0 for the paper's 0.1 ln(factor) + 1 (YaRN).
        beta_fast, beta_slow: rotations over the original length between which YaRN blends.
        truncate: round the blend's bounds to whole dimensions.
        share: of the pairs that turn (proportional).
    """

    kind: RopeKind
    factor: float
    original_max_positions: int
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    share: float = 1.0

    def __post_init__(self) -> None:
        check(self.factor > 0, "rope_scaling.factor", self.factor, "use a positive factor, such as 4.0")
        for field in ("original_max_positions", "beta_fast", "beta_slow"):
            check(getattr(self, field) > 0, f"rope_scaling.{field}", getattr(self, field), "use more than 0")


def extension(text: str) -> dict[str, Any]:
    """The scaling that an option asks for: ``"yarn:4"`` or ``"linear:2.5"``, as a ``rope_scaling`` table.

    Raises:
        InvalidOption: it is neither.
    """
    kind, _, factor = text.partition(":")
    number = math.nan
    with contextlib.suppress(ValueError):
        number = float(factor)
    valid = kind in ("linear", "yarn") and 1 <= number < math.inf
    check(valid, "rope_scaling", text, "use a kind and a factor of 1 or more, such as 'yarn:4'")
    return {"rope_type": kind, "factor": number}


def read_rope(
    raw: Mapping[str, Any], max_positions: int, scaling: str = ""
) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling from a ``config.json``.

    Both layouts are read: ``rope_theta`` and ``rope_scaling`` at the top (transformers 4), and one
    ``rope_parameters`` table (transformers 5).

    Args:
        max_positions: of the configuration.
        scaling: replaces the checkpoint's, see `extension`; empty to keep that.

    Raises:
        InvalidOption: the scaling is of a kind that is not built.
        WeightsError: the base frequency is missing.
    """
    table = {"rope_theta": raw.get("rope_theta")}
    table |= fields.table(raw, "rope_scaling") | fields.table(raw, "rope_parameters")
    if scaling:
        kept = {key: table[key] for key in ("rope_theta", "original_max_position_embeddings") if key in table}
        table = kept | extension(scaling)
    theta = fields.number(table, "rope_theta")
    check(theta > 1, "rope_theta", theta, "restore the checkpoint's, such as 1000000.0")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "yarn"):
        raise InvalidOption(
            f"config.json: rope scaling of type {kind!r} is not supported",
            "use 'default', 'linear' or 'yarn' (edit rope_scaling in config.json)",
        )
    original = fields.integer(table, "original_max_position_embeddings", max_positions)
    check(original >= 1, "original_max_position_embeddings", original, "use 1 or more")
    factor = fields.number(table, "factor", max_positions / original)
    described = RopeScaling(
        kind=kind,
        factor=factor,
        original_max_positions=original,
        attention_factor=fields.number(table, "attention_factor", _mscale_ratio(table, factor)),
        beta_fast=fields.number(table, "beta_fast", 32.0),
        beta_slow=fields.number(table, "beta_slow", 1.0),
        truncate=bool(table.get("truncate", True)),
    )
    return theta, described


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _mscale_ratio(table: Mapping[str, Any], factor: float) -> float:
    """Attention factor that ``mscale`` and ``mscale_all_dim`` give together, 0 unless both are set."""
    mscale, all_dim = fields.number(table, "mscale", 0.0), fields.number(table, "mscale_all_dim", 0.0)
    return _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else 0.0


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dimensions.

    Returns:
        ``[dim / 2]`` float32 on the CPU, and the factor on cosines and sines.
    """
    # float32 as the published code computes it: another precision moves far positions visibly
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    plain = 1.0 / wavelengths
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "proportional":
        plain[int(scaling.share * dim // 2) :] = 0.0
        return plain / scaling.factor, 1.0
    keep = 1.0 - _blend(dim, theta, scaling)
    stretched = 1.0 / (scaling.factor * wavelengths)
    return stretched * (1.0 - keep) + plain * keep, scaling.attention_factor or _mscale(scaling.factor)


def _blend(dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """YaRN's ramp over the pairs, [dim / 2]: 0 keeps a frequency, 1 stretches it (section 3.2)."""

    def dimension_of(rotations: float) -> float:
        return (
            dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class RotaryEmbedding:
    """Cosines and sines of positions, float32, on one device."""

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> None:
        inverse, self.attention_factor = inverse_frequencies(dim, theta, scaling)
        self.inverse_frequencies = inverse.to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``positions`` [T] int64 -> (cos, sin), each [T, dim / 2] float32."""
        angles = positions.float()[:, None] * self.inverse_frequencies
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

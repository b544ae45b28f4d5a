"""Options of a request: what is refused, and how."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from herald.config import EngineConfig, OffloadConfig
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams

NONE_IS_ALLOWED = (
    *("seed", "confidence_threshold", "confidence_factor", "kv_budget"),
    *("editing_threshold", "entropy_bound", "stop_entropy"),
)


@pytest.mark.parametrize("seed", [None, 0, 1, 2**32, 2**63 - 1, np.int64(7)])
def test_seeds_in_range_are_taken(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 1.0, "1", True])
def test_other_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(InvalidOption, match=f"seed={seed!r} is not valid; use 0 to {2**63 - 1}"):
        SamplingParams(seed=seed)


@pytest.mark.parametrize("kind", [SamplingParams, OffloadConfig, EngineConfig])
def test_a_value_of_another_kind_names_its_field(kind: type) -> None:
    for field in dataclasses.fields(kind):
        wrong: list[Any] = ["1", [], object()]
        if field.name not in NONE_IS_ALLOWED:
            wrong.append(None)
        if isinstance(field.default, bool):
            wrong += [0, 1.0]
        else:
            wrong += [True, math.nan]
        if isinstance(field.default, int):
            wrong.append(0.5)
        if field.name == "stop":
            wrong = [None, 5, [5], b"x", [""], {"a": 1}]
        for value in wrong:
            with pytest.raises(InvalidOption, match=f"^{field.name}="):
                kind(**{field.name: value})


def test_numbers_of_numpy_are_taken() -> None:
    params = SamplingParams(max_tokens=np.int32(3), temperature=np.float32(0.5), top_p=np.float64(1))
    assert (params.max_tokens, params.temperature) == (3, 0.5)


def test_temperature_is_finite() -> None:
    with pytest.raises(InvalidOption, match="temperature=inf"):
        SamplingParams(temperature=math.inf)

"""Options of a request: what is refused, and how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams


@pytest.mark.parametrize("seed", [None, 0, 1, 2**32, 2**63 - 1, np.int64(7)])
def test_seeds_in_range_are_taken(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 1.0, "1"])
def test_other_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(InvalidOption, match=f"seed={seed!r} is not valid; use 0 to {2**63 - 1}"):
        SamplingParams(seed=seed)

"""Top k by threshold against a stable sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from herald.select import topk
from herald.select.reference import top_k_reference


def run(scores: np.ndarray, k: int, first: int = 0) -> np.ndarray:
    keys, histogram = topk.scratch(scores.size)
    out = np.full(k, -7, dtype=np.int32)
    topk.top_k(scores, k, first, keys, histogram, out)
    return out


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_floats(data: st.DataObject) -> None:
    elements = st.one_of(
        st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf, 1e-45])
    )
    scores = data.draw(hnp.arrays(np.float32, st.integers(1, 60), elements=elements))
    k = data.draw(st.integers(1, scores.size))
    assert np.array_equal(run(scores, k, 100), top_k_reference(scores, k, 100))


@pytest.mark.parametrize("k", [1, 5, 500, 1999, 2000])
def test_neighbours_that_differ_in_the_last_bit(k: int) -> None:
    rng = np.random.default_rng(k)
    bits = np.float32(-3.25).view(np.uint32) + rng.integers(0, 700, 2000).astype(np.uint32)
    scores = bits.view(np.float32)
    assert np.array_equal(run(scores, k), top_k_reference(scores, k, 0))


def test_nan_is_below_everything() -> None:
    scores = np.array([np.nan, -np.inf, -np.nan, 3, np.nan], dtype=np.float32)
    assert run(scores, 2).tolist() == [1, 3]
    assert run(scores, 3).tolist() == [0, 1, 3]

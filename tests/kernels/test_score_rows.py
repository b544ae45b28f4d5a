"""`score_rows` against float64, and by what the scores of all rows must add up to."""

from __future__ import annotations

import math

import pytest
import torch

from herald_kernels import score_rows
from tests.kernels import naive
from tests.kernels.support import TORCH, TRITON, Draw, Target, on, relative_error

CASES = [
    # queries, G, KV heads, head_dim, rows
    (1, 1, 1, 16, 1),
    (4, 2, 2, 32, 77),
    (16, 3, 1, 64, 130),
    (32, 4, 2, 128, 257),
    (64, 8, 1, 16, 300),
    (5, 1, 3, 128, 33),
]


@pytest.mark.parametrize("operator", ["max", "sum"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(target: Target, case: tuple[int, int, int, int, int], operator: str) -> None:
    num_queries, group, kv_heads, head_dim, num_rows = case
    draw = Draw(target, sum(case))
    num_rows *= 50 if target.device == "cuda" else 1
    q = draw.normal(num_queries, kv_heads * group, head_dim)
    lse = 3 * draw.normal(num_queries, kv_heads * group).float()
    rows = draw.normal(2, kv_heads, num_rows, 2 * head_dim)[1]
    rows[..., head_dim:] = float("nan")
    scores = score_rows(q, lse, rows, head_dim**-0.5, operator)
    assert scores.dtype == torch.float32
    expected = naive.score_rows(q, lse, rows, head_dim**-0.5, operator)
    assert relative_error(scores, expected) < 1e-5


def test_shares_of_all_rows_add_up_to_the_queries(target: Target) -> None:
    """With the log-sum-exp over exactly these rows, each query and head hands out one unit of attention."""
    draw = Draw(target, 1)
    q, rows = draw.normal(8, 4, 32), draw.normal(2, 203, 64)
    lse = torch.zeros(8, 4, device=target.device)
    for head in range(4):
        lse[:, head] = naive.attention(q[:, head], rows[head // 2, :, :32], rows[head // 2, :, 32:], 0.2)[1]
    shares = score_rows(q, lse, rows, 0.2, "sum").double().exp()
    assert shares.sum(-1).tolist() == pytest.approx([16.0, 16.0], rel=1e-5)
    largest = score_rows(q, lse, rows, 0.2, "max").double().exp()
    assert float(largest.max()) <= 1 + 1e-5
    assert (largest <= shares * (1 + 1e-5)).all()
    assert (shares <= 16 * largest * (1 + 1e-5)).all()


def test_one_query_scores_the_same_either_way(target: Target) -> None:
    draw = Draw(target, 2)
    q, rows, lse = draw.normal(1, 2, 32), draw.normal(2, 50, 64), draw.normal(1, 2).float()
    largest, total = (score_rows(q, lse, rows, 0.2, operator) for operator in ("max", "sum"))
    assert relative_error(total, largest) < 1e-6


def test_sharp_scores_do_not_overflow(target: Target) -> None:
    draw = Draw(target, 3)
    q, rows = draw.normal(4, 2, 32), draw.normal(1, 60, 64)
    lse = torch.full((4, 2), -400.0, device=target.device)
    scores = score_rows(q, lse, rows, 30.0, "sum")
    expected = naive.score_rows(q, lse - 400, rows, 30.0, "max") - 400
    assert float(scores.min()) > math.log(3e38)
    assert relative_error(scores, expected) < 0.01


@on(TRITON)
def test_rows_do_not_see_each_other(target: Target) -> None:
    draw = Draw(target, 4)
    q, rows, lse = draw.normal(8, 4, 32), draw.normal(2, 203, 64), draw.normal(8, 4).float()
    whole = score_rows(q, lse, rows, 0.2, "sum")
    part = score_rows(q, lse, rows[:, 128:], 0.2, "sum")
    assert torch.equal(part, whole[:, 128:])


@on(TORCH)
def test_chunks_of_the_reference_agree(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(target, 5)
    q, rows, lse = draw.normal(8, 4, 32), draw.normal(2, 203, 64), draw.normal(8, 4).float()
    whole = score_rows(q, lse, rows, 0.2, "max")
    monkeypatch.setattr("herald_kernels.ops.score_rows.reference.CHUNK_VALUES", 1000)
    assert relative_error(score_rows(q, lse, rows, 0.2, "max"), whole) < 1e-5


def test_no_rows(target: Target) -> None:
    draw = Draw(target, 6)
    assert score_rows(
        draw.normal(3, 4, 16), draw.normal(3, 4).float(), draw.normal(2, 0, 32), 1.0, "max"
    ).shape == (2, 0)


def test_inputs_that_disagree_are_refused() -> None:
    q, lse, rows = torch.zeros(3, 4, 16), torch.zeros(3, 4), torch.zeros(2, 9, 32)
    with pytest.raises(ValueError, match=r"'mean'.*'max' or 'sum'"):
        score_rows(q, lse, rows, 1.0, "mean")
    with pytest.raises(ValueError, match="does not match rows"):
        score_rows(q, lse, rows[..., :16], 1.0, "max")
    with pytest.raises(ValueError, match=r"must be \(3, 4\)"):
        score_rows(q, lse[:2], rows, 1.0, "max")

"""Mass, operators and shares: hand-made examples, and loops written out."""

from __future__ import annotations

import math

import pytest
import torch

from bench_longctx.real_keys import mass as m
from bench_longctx.real_keys.mass import QuerySet, Span


def small_span(monkeypatch: pytest.MonkeyPatch, prefix: int, sinks: int, recent: int) -> Span:
    monkeypatch.setattr(m, "SINK_ROWS", sinks)
    monkeypatch.setattr(m, "RECENT_ROWS", recent)
    return Span(prefix)


def by_hand(queries: torch.Tensor, keys: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Attention [H, n, G, first + n] of queries [n, Hq, D], one query after the other, in float64."""
    count, query_heads, _ = queries.shape
    heads = len(keys)
    group = query_heads // heads
    out = torch.zeros(heads, count, group, first + count, dtype=torch.float64)
    for h in range(heads):
        for i in range(count):
            for g in range(group):
                seen = keys[h, : first + i + 1].double()
                scores = seen @ queries[i, h * group + g].double() * scale
                out[h, i, g, : first + i + 1] = scores.softmax(-1)
    return out


def draw(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, 8, generator=generator), torch.randn(2, 40, 8, generator=generator)


def test_mass_of_a_hand_made_block():
    """One query, three rows: the softmax of (log 1, log 2, log 5), the last row its own."""
    keys = torch.tensor([1.0, 2.0, 5.0]).log().view(1, 3, 1)
    block = m.attend(torch.ones(1, 1, 1), keys, 2, 1.0)
    assert block.lse.item() == pytest.approx(math.log(8))
    assert m.row_mass(block, keys[:, :2], 1.0)[0].tolist() == pytest.approx([1 / 8, 2 / 8])


def test_attention_equals_the_loop():
    queries, keys = draw()
    block = m.attend(queries, keys, 33, 0.4)
    expected = by_hand(queries, keys, 33, 0.4)
    assert m.row_mass(block, keys[:, :33], 0.4).double() == pytest.approx(
        expected[..., :33].sum((1, 2)).numpy(), rel=1e-4
    )


@pytest.mark.parametrize("operator", ["max", "sum", "mean_max"])
def test_operators_equal_the_loop(operator):
    queries, keys = draw(1)
    block = m.attend(queries, keys, 33, 0.4)
    weights = by_hand(queries, keys, 33, 0.4)[..., :33]  # [H, n, G, R]
    found = m.reduce(block.log_weights(keys[:, :33], 0.4), operator).exp()
    heads, count, group, rows = weights.shape
    for h in range(heads):
        for r in range(rows):
            each = [[weights[h, i, g, r].item() for i in range(count)] for g in range(group)]
            expected = {
                "max": max(max(row) for row in each),
                "sum": sum(sum(row) for row in each),
                "mean_max": max(sum(row) for row in each),
            }[operator]
            assert found[h, r].item() == pytest.approx(expected, rel=1e-4)


def test_unknown_operator():
    with pytest.raises(ValueError, match="median"):
        m.reduce(torch.zeros(1, 1, 1, 3), "median")


def test_mean_query():
    queries, keys = draw(2)
    block = m.attend(queries, keys, 33, 0.4)
    mean = m.mean_query(block, keys[:, :33], 0.4)
    weights = mean.log_weights(keys[:, :33], 0.4).exp()
    assert weights.sum(-1) == pytest.approx(torch.ones(2, 1, 3).numpy(), rel=1e-5)
    assert mean.values[1, 0, 2] == pytest.approx(queries[:, 5].mean(0).numpy(), abs=1e-6)


def test_budget_counts_sinks_and_recent_rows():
    span = Span(1000)
    assert (span.first, span.last) == (4, 936)
    assert span.rows_chosen(0.1) == 100 - 68
    assert span.rows_chosen(0.1001) == 101 - 68
    assert span.rows_chosen(0.05) == 0
    assert span.rows_chosen(1.0) == 932 == span.rows_chosen(2.0)


def test_shares_by_hand(monkeypatch):
    span = small_span(monkeypatch, 8, sinks=1, recent=2)
    mass = torch.tensor([[8.0, 1, 4, 2, 3, 0, 1, 1]])  # fixed: 8 + 1 + 1 of 20
    order = m.ranking(span.candidates(mass))
    assert order.tolist() == [[1, 3, 2, 0, 4]]
    curve = m.share_by_size(mass, span, order)
    assert curve[0].tolist() == pytest.approx([x / 20 for x in (10, 14, 17, 19, 20, 20)])
    assert m.share_of_set(mass, span, torch.tensor([[2, 5]])).tolist() == pytest.approx([14 / 20])
    assert m.free_best_share(mass, 3).tolist() == pytest.approx([15 / 20])
    assert m.window_share(mass, 4).tolist() == pytest.approx([5 / 20])


def test_ties_go_to_the_lower_row():
    assert m.ranking(torch.tensor([[1.0, 2, 2, 1, 2]])).tolist() == [[1, 2, 4, 0, 3]]


def test_best_set_is_an_upper_bound():
    span = Span(200)
    generator = torch.Generator().manual_seed(3)
    mass = torch.rand(3, 200, generator=generator) ** 8
    best = m.share_by_size(mass, span, m.ranking(span.candidates(mass)))
    assert (best[:, -1] == pytest.approx(1.0)) and (best.diff(dim=-1) >= 0).all()
    for _ in range(20):
        scores = torch.rand(3, span.last - span.first, generator=generator)
        held = m.share_by_size(mass, span, m.ranking(scores))
        assert (held <= best + 1e-12).all()
    for k in (0, 1, 40, 132):
        assert (best[:, k] <= m.free_best_share(mass, k + 68) + 1e-12).all()


def test_taking_some_queries():
    queries = QuerySet(torch.arange(12.0).view(1, 6, 1, 2), torch.arange(6.0).view(1, 6, 1))
    some = queries.take([5, 0])
    assert some.lse.flatten().tolist() == [5, 0]
    assert some.values[0, 0, 0].tolist() == [10, 11]

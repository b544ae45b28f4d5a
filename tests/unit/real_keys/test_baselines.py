"""Pages and partial keys: bounds hold, means are means, and all dimensions are exact keys."""

from __future__ import annotations

import pytest
import torch

from bench_longctx.real_keys import baselines
from bench_longctx.real_keys.mass import Span, attend, ranking, reduce

SCALE = 0.3


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 210, 16, generator=generator)
    block = attend(torch.randn(10, 4, 16, generator=generator), keys, 200, SCALE)
    return block, keys[:, :200], Span(200)


def exact(block, keys, span, operator):
    return reduce(block.log_weights(keys[:, span.first : span.last], SCALE), operator)


@pytest.mark.parametrize("operator", ["max", "sum"])
def test_page_bounds_are_bounds_and_pages_of_one_are_exact(drawn, operator):
    expected = exact(*drawn, operator)
    bounds = baselines.page_bounds(*drawn, SCALE, operator)
    assert (bounds >= expected - 1e-4).all()
    assert baselines.page_bounds(*drawn, SCALE, operator, page=1) == pytest.approx(expected.numpy(), abs=1e-4)


def test_rows_of_a_page_share_its_score_and_the_first_come_first(drawn):
    bounds = baselines.page_bounds(*drawn, SCALE, "max")
    span = drawn[2]
    pages = torch.arange(span.first, span.last) // baselines.PAGE
    for page in pages.unique():
        assert (bounds[:, pages == page] == bounds[:, pages == page][:, :1]).all()
    order = ranking(bounds)[0][:12] + span.first
    assert (order.diff() == 1).all() or len((order // baselines.PAGE).unique()) == 2


def test_page_means(drawn):
    block, keys, span = drawn
    means = baselines.page_means(*drawn, SCALE, "max")
    for row in (4, 16, 100, 135):
        first = row // 16 * 16
        mean = keys[:, first : first + 16].mean(1, keepdim=True)
        expected = reduce(block.log_weights(mean, SCALE), "max")[:, 0]
        assert means[:, row - span.first] == pytest.approx(expected.numpy(), abs=1e-4)
    assert baselines.page_means(*drawn, SCALE, "sum", page=1) == pytest.approx(
        exact(*drawn, "sum").numpy(), abs=1e-4
    )


def test_all_dimensions_rank_one_query_as_exact_keys_do(drawn):
    block, keys, span = drawn
    one = block.take([3])
    one.values[:, :, 1] = one.values[:, :, 0]
    one.lse[:, :, 1] = one.lse[:, :, 0]
    sample = torch.randn(2, 3, 2, 16)
    found = baselines.partial_keys(one, keys, span, SCALE, "max", sample, share=1.0)
    shift = found - exact(one, keys, span, "max")
    assert shift == pytest.approx(shift.mean(1, keepdim=True).expand_as(shift).numpy(), abs=1e-4)


def test_partial_keys_find_the_directions_of_the_queries():
    """Queries in two directions out of sixteen: an eighth of the dimensions is enough."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(16, 2, generator=generator)).Q
    keys = torch.randn(1, 208, 16, generator=generator)
    asked = (torch.randn(8, 2, generator=generator) * 4) @ basis.T
    block = attend(asked[:, None], keys, 200, SCALE)
    span = Span(200)
    sample = (40 * torch.randn(1, 30, 1, 2, generator=generator)) @ basis.T
    found = baselines.partial_keys(block, keys[:, :200], span, SCALE, "max", sample, share=1 / 8)
    span_lse = block.log_weights(keys[:, span.first : span.last], SCALE).logsumexp(-1, keepdim=True)
    renormalised = reduce(block.log_weights(keys[:, 4:136], SCALE) - span_lse, "max")
    assert found == pytest.approx(renormalised.numpy(), abs=1e-3)

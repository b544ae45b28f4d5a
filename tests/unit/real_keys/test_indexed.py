"""The runtime's pool, index and selector choose what exact arithmetic chooses."""

from __future__ import annotations

import pytest
import torch

from bench_longctx.real_keys.block import LayerBlock, block_starts, spread
from bench_longctx.real_keys.forward import random_captured
from bench_longctx.real_keys.indexed import IndexedKeys
from bench_longctx.real_keys.mass import ranking, reduce, share_by_size, share_of_set
from herald.errors import UsageError

START, BLOCK, K = 448, 16, 40


@pytest.fixture(scope="module")
def captured():
    return random_captured(500, torch.arange(400, 500))


@pytest.fixture(scope="module")
def layers(captured):
    return [LayerBlock(captured, layer, START, BLOCK) for layer in range(2)]


def asked(captured, layers):
    lse = torch.stack([layer.own.lse.transpose(0, 1).flatten(1) for layer in layers])
    return captured.at(START, START + BLOCK).contiguous(), lse.contiguous()


@pytest.mark.parametrize("operator", ["max", "sum"])
def test_exact_keys_choose_the_reference_set(captured, layers, operator):
    with IndexedKeys(captured, BLOCK, torch.float32, num_threads=1) as keys:
        chosen = keys.select(16, operator, layers[0].span, K, *asked(captured, layers))
    for layer, positions in zip(layers, chosen):
        order = ranking(reduce(layer.log_weights, operator))
        expected = (order[:, :K] + layer.span.first).sort(-1).values
        assert positions.tolist() == expected.tolist()
        share = share_by_size(layer.mass, layer.span, order)[:, K]
        assert share_of_set(layer.mass, layer.span, positions) == pytest.approx(share.numpy())


@pytest.mark.parametrize("operator", ["max", "sum"])
def test_fewer_bits_hold_less_and_never_more_than_the_best(captured, layers, operator):
    best = torch.stack(
        [share_by_size(x.mass, x.span, ranking(x.span.candidates(x.mass)))[:, K] for x in layers]
    )
    held = {}
    with IndexedKeys(captured, BLOCK, torch.float32, num_threads=1) as keys:
        for bits in (16, 8, 4, 1):
            chosen = keys.select(bits, operator, layers[0].span, K, *asked(captured, layers))
            held[bits] = torch.stack([share_of_set(x.mass, x.span, set_) for x, set_ in zip(layers, chosen)])
            assert (held[bits] <= best + 1e-12).all()
    assert held[8].mean() > 0.99 * held[16].mean()
    assert held[16].mean() > held[1].mean()


def test_sum_of_softmax_is_the_best_set(layers):
    for layer in layers:
        order = ranking(reduce(layer.log_weights, "sum"))
        assert order[:, :K].sort(-1).values.tolist() == (
            ranking(layer.span.candidates(layer.mass))[:, :K].sort(-1).values.tolist()
        )


def test_normalising_over_all_rows_changes_nothing(layers):
    """With every candidate resident, the engine's log-sum-exp is the full one."""
    layer = layers[0]
    everything = torch.ones_like(layer.mass, dtype=torch.bool)
    for operator in ("max", "sum"):
        assert layer.resident_scores(everything, operator) == pytest.approx(
            reduce(layer.log_weights, operator).numpy(), abs=1e-5
        )


def test_normalising_over_resident_rows_equals_the_loop(captured, layers):
    layer = layers[1]
    chosen = torch.zeros_like(layer.mass, dtype=torch.bool)
    chosen[0, 10:30] = True
    chosen[1, 200:220] = True
    found = layer.resident_scores(chosen, "max")
    window = START - BLOCK - 64
    everything = captured.keys[1]
    queries = captured.at(START, START + BLOCK)[1]
    for h in range(2):
        rows = [p for p in range(START) if p < 4 or p >= window or chosen[h, p]]
        expected = torch.full((layer.span.last - 4,), -torch.inf)
        for i in range(BLOCK):
            for g in range(2):
                q = queries[i, 2 * h + g] * captured.scale
                seen = everything[h, [*rows, *range(START, START + i + 1)]]
                lse = (seen @ q).logsumexp(0)
                expected = torch.maximum(expected, everything[h, 4 : layer.span.last] @ q - lse)
        assert found[h] == pytest.approx(expected.numpy(), abs=1e-3)


def test_previous_sets_are_those_of_the_block_before(captured, layers):
    before = LayerBlock(captured, 0, START - BLOCK, BLOCK)
    k = before.span.rows_chosen(0.25)
    assert k > 0
    expected = ranking(reduce(before.log_weights, "max"))[:, :k] + 4
    found = layers[0].previous_sets([0.25])[0.25]
    assert found.sum(-1).tolist() == [k, k]
    assert found.gather(1, expected).all()
    best = ranking(before.span.candidates(before.mass))[:, :k] + 4
    assert layers[0].previous_best_sets([0.25])[0.25].gather(1, best).all()


def test_blocks_are_spread_over_the_second_half():
    starts = block_starts(8192, 16, 32)
    assert starts[0] == 4096 and starts[-1] == 8128 and len(set(starts)) == 16
    assert all(start % 64 == 0 for start in starts)
    with pytest.raises(UsageError, match="at most 4"):
        block_starts(512, 5, 32)
    assert spread(32, 5) == [0, 8, 16, 23, 31]


def test_queries_that_were_not_kept():
    captured = random_captured(500, torch.arange(300, 310))
    with pytest.raises(ValueError, match="305 to 311"):
        captured.at(305, 311)

"""Every method selects as it says, on a real engine with the small golden checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from bench_longctx.quality import methods
from bench_longctx.quality.methods import Switches, attach
from bench_longctx.quality.methods.base import (
    Method,
    PerRequest,
    WrappedSelector,
    as_float,
    best_rows,
    keys_of,
)
from bench_longctx.quality.methods.operators import MeanMax, mean_max_scores, operator_part
from bench_longctx.quality.methods.page_bounds import (
    PAGE,
    PageBounds,
    Quest,
    bounds_of,
    page_scores,
    rows_of_pages,
)
from bench_longctx.quality.methods.partial_keys import kept_dims, largest_only
from bench_longctx.quality.methods.previous_block import QueriesBefore
from herald.config import OffloadConfig
from herald.engine.engine import Engine
from herald.engine.prefill import NO_VOTE
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams
from herald_kernels import score_rows
from tests.engine.conftest import MakeEngine
from tests.engine.support import check_resident_rows, random_prompt, run, tokens

# Blocks of 8 in four steps each, so that a look-ahead in step 1 has its time.
PARAMS = SamplingParams(max_tokens=44, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
SMALL = {"sink_rows": 2, "recent_rows": 8}
BUDGET = 0.2
SPARSE = [name for name in methods.NAMES if name != "dense"]


@dataclass
class Call:
    """A call of `select`: copies of what was passed, and the rows."""

    page_ids: np.ndarray
    span: tuple[int, int, int]
    queries: np.ndarray
    lse: np.ndarray
    rows: np.ndarray


@dataclass
class Spy(Method):
    """A method that selects nothing itself and writes down what passes."""

    calls: list[Call] = field(default_factory=list)
    asking: list[torch.Tensor] = field(default_factory=list)

    def selector(self, inner: Any, store: Any) -> Any:
        spy = self

        class Watched(WrappedSelector):
            def select(self, page_ids, first, last, k, queries, lse, scale):  # type: ignore[no-untyped-def]
                rows = self.inner.select(page_ids, first, last, k, queries, lse, scale)
                if queries.any():  # not the call that warms up
                    spy.calls.append(Call(page_ids, (first, last, k), queries.copy(), lse.copy(), rows))
                return rows

        return Watched(inner, store)

    def first_scores(self, inner: Any) -> Any:
        def scores(q, lse, rows, scale, span):  # type: ignore[no-untyped-def]
            self.asking.append(lse)
            return inner(q, lse, rows, scale, span)

        return scores


def options(method: Method, budget: float = BUDGET, **switches: Any) -> OffloadConfig:
    given = method.offload(budget, Switches(**switches))
    return OffloadConfig(**{**vars(given), **SMALL})


def watched(
    make_engine: MakeEngine, name: str, budget: float = BUDGET, operator: str = "max", **changes: Any
) -> tuple[Engine, Spy, Spy]:
    """An engine with a method between two spies: the inner sees what it asks, the outer what it gets."""
    method = methods.get(name)
    config = OffloadConfig(**{**vars(options(method, budget, operator=operator)), **changes})
    engine = make_engine("sdar_b8", config)
    inner, outer = Spy(), Spy()
    attach(engine, *operator_part(operator, config.index_bits), inner, method, outer)
    return engine, inner, outer


def pool_of(engine: Engine) -> Any:
    assert engine.memory.store is not None
    return engine.memory.store.pool


@pytest.mark.parametrize("name", SPARSE)
def test_every_method_runs_and_keeps_true_rows(make_engine: MakeEngine, name: str):
    method = methods.get(name)
    engine = make_engine("sdar_b8", options(method))
    method.install(engine)
    compared: list[int] = []
    prompts = [random_prompt(n, n) for n in (150, 333)]
    requests = run(engine, prompts, PARAMS, lambda live: compared.append(check_resident_rows(engine, live)))
    assert [len(r.output_ids) for r in requests] == [44, 44]
    assert sum(compared) > 1000


@pytest.mark.parametrize("name", SPARSE)
def test_a_budget_of_everything_is_dense(make_engine: MakeEngine, name: str):
    prompts = [random_prompt(150, 1)]
    method = methods.get(name)
    engine = make_engine("sdar_b8", options(method, 1.0))
    method.install(engine)
    dense = make_engine("sdar_b8", methods.get("dense").offload(1.0, Switches()))
    assert tokens(run(engine, prompts, PARAMS)) == tokens(run(dense, prompts, PARAMS))


def test_window_sinks(make_engine: MakeEngine):
    engine, _, outer = watched(make_engine, "window_sinks")
    first_sets: list[np.ndarray] = []

    def look(live: list[Any]) -> None:
        if live and live[0].resident is not None and not first_sets and live[0].resident.length:
            first_sets.append(live[0].resident.snapshot()[2][:, :, : live[0].resident.length].copy())

    run(engine, [random_prompt(333, 3)], PARAMS, look)
    assert len(outer.calls) >= 4
    for call in outer.calls:
        _, last, k = call.span
        assert (call.rows == np.arange(last - k, last)).all()
    prefix, size = 328, first_sets[0].shape[2]
    expected = [*range(2), *range(prefix - size + 2, prefix)]
    assert (np.sort(first_sets[0], axis=2) == expected).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_centre_scores_one_query(make_engine: MakeEngine, bits: int):
    engine, inner, outer = watched(make_engine, "centre", index_bits=bits)
    assert engine.offload.kv_budget == pytest.approx(1.75 * BUDGET)
    assert engine.offload.lookahead_step == 1
    run(engine, [random_prompt(333, 3)], PARAMS)
    assert inner.calls
    for asked, given in zip(inner.calls, outer.calls, strict=True):
        counting = np.isfinite(asked.lse)
        assert counting[:, 4].all() and counting.sum() == counting[:, 4].size
        assert (asked.lse[:, 4] == given.lse[:, 4]).all()
        assert np.isfinite(given.lse).all()
        # as if no other query had been there
        selector = engine.memory.store.selector.inner.inner.inner  # type: ignore[union-attr]
        first, last, k = asked.span
        scale = engine.model.softmax_scale
        alone = selector.select(
            asked.page_ids, first, last, k, asked.queries[:, 4:5], asked.lse[:, 4:5], scale
        )
        if bits == 16:  # codes of queries depend on which are quantised together
            assert (alone == given.rows).all()
    # 333 = 41 blocks and 5 known positions: of the masked ones 5, 6 and 7 the middle one asks
    assert [(lse[:, 0] < NO_VOTE).nonzero().tolist() for lse in inner.asking] == [[[6]]] * len(inner.asking)
    assert inner.asking


def test_centre_budget_is_capped():
    centre = methods.get("centre")
    assert centre.offload(0.1, Switches()).kv_budget == pytest.approx(0.175)
    assert centre.offload(0.9, Switches()).kv_budget == 1.0


def test_moments_of_selection(make_engine: MakeEngine):
    counters = {}
    for name in ("own_step0", "lookahead_1", "lookahead_k"):
        engine, _, _ = watched(make_engine, name)
        (request,) = run(engine, [random_prompt(300, 3)], PARAMS)
        counters[name] = request.counters
    assert counters["own_step0"].lookaheads == 0 and counters["own_step0"].boundary_selections >= 4
    assert counters["lookahead_1"].lookaheads >= 4 and counters["lookahead_1"].boundary_selections == 0
    assert methods.get("lookahead_k").offload(0.1, Switches(lookahead_step=5)).lookahead_step == 5
    late = methods.get("lookahead_late").offload(0.1, Switches(lookahead_step=5))
    assert (late.lookahead, late.lookahead_step) == ("late", 1)


def test_previous_block_asks_with_the_queries_before(make_engine: MakeEngine):
    engine, inner, outer = watched(make_engine, "previous_block")
    run(engine, [random_prompt(333, 3), random_prompt(250, 4)], PARAMS)
    wrapped = engine.memory.store.selector.inner  # type: ignore[union-attr]
    assert isinstance(wrapped, QueriesBefore)
    # one fallback a request, and one for the call that warms up
    assert wrapped.fallbacks <= 3
    before: dict[int, Call] = {}
    compared = 0
    for asked, given in zip(inner.calls, outer.calls, strict=True):
        last = before.get(id(given.page_ids), given)
        assert (asked.queries == last.queries).all() and (asked.lse == last.lse).all()
        compared += last is not given
        before[id(given.page_ids)] = given
    assert compared >= 6


def test_state_ends_with_its_request():
    states: PerRequest[int] = PerRequest()
    pages = np.arange(3)
    states.set(pages, 1)
    states.set(pages, 2)
    assert states.get(pages) == 2 and states.get(pages.copy()) is None
    del pages
    assert len(states) == 0


@pytest.mark.parametrize("page_size", [8, 24, 64])
def test_page_bounds_takes_whole_pages(make_engine: MakeEngine, page_size: int):
    engine, _, outer = watched(make_engine, "page_bounds", page_size=page_size)
    run(engine, [random_prompt(333, 3)], PARAMS)
    assert len(outer.calls) >= 4
    for call in outer.calls:
        first, last, k = call.span
        for rows in call.rows.reshape(-1, k):
            assert len(set(rows.tolist())) == k and rows.min() >= first and rows.max() < last
            taken = dict(zip(*np.unique(rows // PAGE, return_counts=True)))
            cut = [
                page
                for page, count in taken.items()
                if count < min(last, (page + 1) * PAGE) - max(first, page * PAGE)
            ]
            assert len(cut) <= 1


@pytest.mark.parametrize("page_size", [8, 64])
def test_page_bounds_are_upper_bounds_of_appended_pages_too(make_engine: MakeEngine, page_size: int):
    """The rows of each call equal those of bounds made from scratch, in plain loops, at that time."""
    engine, _, _ = watched(make_engine, "page_bounds", page_size=page_size)
    compared: list[int] = []

    class Check(Method):
        def selector(self, inner: Any, store: Any) -> Any:
            class Checked(WrappedSelector):
                def select(self, page_ids, first, last, k, queries, lse, scale):  # type: ignore[no-untyped-def]
                    rows = self.inner.select(page_ids, first, last, k, queries, lse, scale)
                    if queries.any():
                        keys = keys_of(self.pool, page_ids, 0, last)
                        assert (rows == naive_pages(keys, queries, lse, scale, first, last, k)).all()
                        compared.append(last)
                    return rows

            return Checked(inner, store)

    attach(engine, Check())
    run(engine, [random_prompt(137, 3)], SamplingParams(max_tokens=90, ignore_eos=True))
    assert len(compared) >= 8
    assert len({last // PAGE for last in compared}) >= 4


def naive_pages(
    keys: np.ndarray, queries: np.ndarray, lse: np.ndarray, scale: float, first: int, last: int, k: int
) -> np.ndarray:
    layers, heads, _, _ = keys.shape
    group = queries.shape[2] // heads
    out = np.empty((layers, heads, k), dtype=np.int32)
    for layer in range(layers):
        for head in range(heads):
            scores = []
            for begin in range(0, last, PAGE):
                page = keys[layer, head, begin : begin + PAGE]
                low, high = page.min(axis=0), page.max(axis=0)
                best = -np.inf
                for m in range(queries.shape[1]):
                    for g in range(head * group, (head + 1) * group):
                        q = queries[layer, m, g]
                        bound = np.maximum(q * low, q * high).sum()
                        best = max(best, bound * scale - lse[layer, m, g])
                scores.append(best)
            rows: list[int] = []
            for page_number in sorted(range(len(scores)), key=lambda p: -scores[p]):
                rows += range(max(first, page_number * PAGE), min(last, (page_number + 1) * PAGE))
            out[layer, head] = sorted(rows[:k])
    return out


def test_page_bounds_first_set_is_the_same_rule():
    """The scores for the first block order rows as the selector does."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(8, 4, 16, generator=generator)
    lse = torch.randn(8, 4, generator=generator)
    rows = torch.randn(2, 75, 32, generator=generator)
    scores = Quest().first_scores(score_rows)(q, lse, rows, 0.25, (2, 70))  # type: ignore[arg-type]
    taken = scores[:, 2:70].topk(30, dim=1).indices.sort(1).values + 2
    keys = rows[None, :, :, :16].numpy()
    per_page = page_scores(bounds_of(keys), q[None].numpy(), lse[None].numpy(), 0.25)
    assert (rows_of_pages(per_page, 2, 70, 30)[0] == taken.numpy()).all()


def test_partial_keys_keep_the_largest_dimensions(make_engine: MakeEngine):
    engine, inner, outer = watched(make_engine, "partial_keys")
    assert engine.offload.index_bits == 16
    run(engine, [random_prompt(333, 3)], PARAMS)
    for asked, given in zip(inner.calls, outer.calls, strict=True):
        dim = asked.queries.shape[-1]
        kept = asked.queries != 0
        assert (kept.sum(axis=-1) == kept_dims(dim)).all()
        assert (asked.queries[kept] == given.queries[kept]).all()
        least_kept = np.where(kept, np.abs(given.queries), np.inf).min(axis=-1)
        assert (np.where(kept, 0, np.abs(given.queries)).max(axis=-1) <= least_kept).all()
    assert kept_dims(64) == 19


def test_bfloat16_queries_are_read():
    values = torch.tensor([[1.5, -2.0, 0.25, 8.0]], dtype=torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    assert (as_float(bits) == values.float().numpy()).all()
    assert (largest_only(bits) == [[0, 0, 0, 8.0]]).all()


def test_mean_max_against_the_formula(make_engine: MakeEngine):
    engine, _, outer = watched(make_engine, "own_step0", operator="mean-max", index_bits=16)
    run(engine, [random_prompt(333, 3)], PARAMS)
    # the retriever's call was the last to see these rows; what was appended since lies behind them
    call = outer.calls[-1]
    first, last, k = call.span
    keys = keys_of(pool_of(engine), call.page_ids, first, last)
    scale = engine.model.softmax_scale
    layers, heads = keys.shape[:2]
    grouped = call.queries.reshape(layers, 8, heads, -1, keys.shape[3])
    norms = call.lse.reshape(layers, 8, heads, -1)
    logits = np.einsum("lhnd,lmhgd->lhgmn", keys, grouped) * scale - norms.transpose(0, 2, 3, 1)[..., None]
    expected = np.log(np.exp(logits).mean(axis=3)).max(axis=2)
    found = mean_max_scores(keys, call.queries, call.lse, scale) - np.log(8)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert (call.rows == best_rows(found, k, first)).all()


def test_mean_max_first_scores_and_queries_that_do_not_count():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, 16, generator=generator)
    lse = torch.randn(4, 4, generator=generator)
    rows = torch.randn(2, 50, 32, generator=generator)
    first = MeanMax().first_scores(score_rows)  # type: ignore[arg-type]
    keys = rows[None, :, :, :16].numpy()
    whole = mean_max_scores(keys, q[None].numpy(), lse[None].numpy(), 0.25)[0]
    np.testing.assert_allclose(first(q, lse, rows, 0.25, (0, 50)).numpy(), whole, rtol=1e-4, atol=1e-4)
    some = mean_max_scores(keys, q[None, 1:].numpy(), lse[None, 1:].numpy(), 0.25)[0]
    silent = lse.clone()
    silent[0] = NO_VOTE
    np.testing.assert_allclose(first(q, silent, rows, 0.25, (0, 50)).numpy(), some, rtol=1e-4, atol=1e-4)
    silent[0] = float("inf")
    found = mean_max_scores(keys, q[None].numpy(), silent[None].numpy(), 0.25)[0]
    np.testing.assert_allclose(found, some, rtol=1e-4, atol=1e-4)


def test_mean_max_wants_exact_keys():
    with pytest.raises(InvalidOption, match="operator='mean-max' with index_bits=8; use --index-bits 16"):
        operator_part("mean-max", 8)
    with pytest.raises(InvalidOption, match="operator='median'"):
        operator_part("median", 16)


@pytest.mark.parametrize("operator", ["max", "sum"])
@pytest.mark.parametrize("bits", [16, 8, 4, 1])
def test_switches_reach_the_engine(make_engine: MakeEngine, operator: str, bits: int):
    config = methods.get("lookahead_1").offload(0.1, Switches(index_bits=bits, operator=operator))
    assert (config.index_bits, config.score_operator, config.min_resident_rows) == (bits, operator, 1)


def test_names():
    assert len(set(methods.NAMES)) == len(methods.ALL)
    assert all(method.about for method in methods.ALL)
    with pytest.raises(InvalidOption, match="method='best' is not known; use one of dense, "):
        methods.get("best")


def test_keys_of_any_span(make_engine: MakeEngine):
    engine, _, _ = watched(make_engine, "lookahead_1", page_size=24)
    seen: list[int] = []

    def look(live: list[Any]) -> None:
        if not live or live[0].pages is None or seen or engine.retriever is None or not live[0].output_ids:
            return
        engine.retriever.drain()
        pool, pages = pool_of(engine), live[0].pages
        keys = keys_of(pool, pages, 5, 77)
        for position in (5, 23, 24, 50, 76):
            row = pool.rows[:, int(pages[position // 24]), :, position % 24, : pool.layout.head_dim]
            assert (keys[:, :, position - 5] == row.numpy()).all()
        seen.append(keys.shape[2])

    run(engine, [random_prompt(200, 3)], PARAMS, look)
    assert seen == [72]


def test_page_bounds_keep_whole_pages_only(make_engine: MakeEngine):
    engine, _, _ = watched(make_engine, "page_bounds")
    run(engine, [random_prompt(200, 3)], PARAMS)
    wrapped = engine.memory.store.selector.inner  # type: ignore[union-attr]
    assert isinstance(wrapped, PageBounds)
    # what a scan of the bounds reads: two a page, for 100 rows seven pages
    layout = wrapped.pool.layout
    assert wrapped.bytes_scanned(2, 100, 10) == 7 * layout.num_layers * layout.num_kv_heads * layout.row_bytes
    assert wrapped.bytes_scanned(2, 12, 10) == 0

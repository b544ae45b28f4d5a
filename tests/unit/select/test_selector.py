"""The selector against plain references: exact sets, ties, recall, independence of threads and pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from herald.errors import InvalidOption, UsageError
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.select import Selector, select_reference
from herald.select.reference import score_reference
from herald.select.tiles import HAS_VNNI

LAYERS, HEADS, GROUP, PAGE = 2, 2, 3, 8
PATHS = [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_VNNI, reason="needs AVX-512 VNNI"))]


@dataclass
class Case:
    """A request in a pool, with queries for it."""

    pool: HostPool
    index: KeyIndex
    pages: np.ndarray
    queries: np.ndarray
    lse: np.ndarray
    scale: float

    def select(self, first: int, last: int, k: int, **options: object) -> np.ndarray:
        selector = Selector(self.pool, self.index, **{"num_threads": 1, **options})  # type: ignore[arg-type]
        try:
            return selector.select(self.pages, first, last, k, self.queries, self.lse, self.scale)
        finally:
            selector.close()

    def reference(self, first: int, last: int, k: int, operator: str = "max") -> np.ndarray:
        arguments = (self.pool, self.index, self.pages, first, last, k, self.queries, self.lse, self.scale)
        return select_reference(*arguments, operator)  # type: ignore[arg-type]


def make_case(
    bits: int = 8,
    head_dim: int = 16,
    positions: int = 5,
    dtype: torch.dtype = torch.float32,
    num_pages: int = 12,
    keys: torch.Tensor | None = None,
    pages: np.ndarray | None = None,
) -> Case:
    """Unused pages of the pool hold NaN. ``keys`` [L, H, rows, D] or random."""
    rng = np.random.default_rng(head_dim * 100 + positions)
    pool = HostPool(RowLayout(LAYERS, HEADS, head_dim, PAGE, dtype), num_pages + 3, pin=False)
    pool.rows.fill_(float("nan"))
    if pages is None:
        pages = rng.permutation(num_pages + 3)[:num_pages].astype(np.int32)
    if keys is None:
        keys = torch.from_numpy(rng.standard_normal((LAYERS, HEADS, num_pages * PAGE, head_dim)) + 0.5)
    for i, page in enumerate(pages):
        pool.rows[:, page, :, :, :head_dim] = keys[:, :, i * PAGE : (i + 1) * PAGE].to(dtype)
    index = KeyIndex(pool, bits)  # type: ignore[arg-type]
    index.append_span(pages, 0, num_pages * PAGE)
    queries = rng.standard_normal((LAYERS, positions, HEADS * GROUP, head_dim)).astype(np.float32)
    lse = rng.standard_normal(queries.shape[:3]).astype(np.float32)
    return Case(pool, index, pages, queries, lse, head_dim**-0.5)


def torch_top_k(scores: torch.Tensor, k: int, first: int) -> np.ndarray:
    """torch.topk with the tie rule: equal scores are told apart by position, before it sees them."""
    distinct = torch.unique(scores)
    rank = torch.searchsorted(distinct, scores)
    n = scores.shape[-1]
    keyed = rank * n + (n - 1 - torch.arange(n))
    return (torch.topk(keyed, k).indices.sort().values + first).numpy()


def exact_scores(case: Case, first: int, last: int) -> torch.Tensor:
    layout = case.pool.layout
    keys = case.pool.rows[:, case.pages.astype(np.int64), :, :, : layout.head_dim].float()
    keys = keys.transpose(1, 2).reshape(LAYERS, HEADS, -1, layout.head_dim)[:, :, first:last]
    queries = torch.from_numpy(case.queries).view(LAYERS, -1, HEADS, GROUP, layout.head_dim)
    lse = torch.from_numpy(case.lse).view(LAYERS, -1, HEADS, GROUP)
    scores = torch.einsum("lmhgd,lhnd->lhmgn", queries, keys) * case.scale
    return (scores - lse.permute(0, 2, 1, 3)[..., None]).flatten(2, 3).amax(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("first", "last", "k"), [(0, 96, 10), (3, 61, 57), (9, 14, 1)])
def test_sixteen_bits_equals_torch_topk(dtype: torch.dtype, first: int, last: int, k: int) -> None:
    case = make_case(bits=16, dtype=dtype)
    assert np.array_equal(case.select(first, last, k), torch_top_k(exact_scores(case, first, last), k, first))


@pytest.mark.parametrize("k", [1, 7, 40, 88])
def test_ties_go_to_the_lower_position(k: int) -> None:
    """Small integers everywhere: scores are exact, take few values, and include -0 and +0."""
    rng = np.random.default_rng(k)
    keys = torch.from_numpy(rng.integers(-1, 2, (LAYERS, HEADS, 96, 16)))
    case = make_case(bits=16, keys=keys)
    case.queries = rng.integers(-1, 2, case.queries.shape).astype(np.float32)
    case.queries[:, :, :2] = 0
    case.lse = np.zeros_like(case.lse)
    case.scale = 0.5
    scores = exact_scores(case, 4, 93)
    assert len(torch.unique(scores)) < 40
    assert np.array_equal(case.select(4, 93, k), torch_top_k(scores, k, 4))


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
def test_all_equal_takes_the_first(bits: int) -> None:
    case = make_case(bits=bits, keys=torch.ones(LAYERS, HEADS, 96, 16))
    assert (case.select(5, 90, 11) == np.arange(5, 16)).all()


@pytest.mark.parametrize("vnni", PATHS)
@pytest.mark.parametrize("operator", ["max", "sum"])
@pytest.mark.parametrize("bits", [16, 8, 4, 1])
@pytest.mark.parametrize(("head_dim", "positions"), [(16, 1), (24, 5), (64, 16), (32, 27)])
def test_equals_the_reference_exactly(
    head_dim: int, positions: int, bits: int, operator: str, vnni: bool
) -> None:
    """Widths of 1, 1, 3 and 6 vectors of queries: every tile variant, with padding."""
    case = make_case(bits, head_dim, positions)
    for first, last, k in ((0, 96, 9), (3, 85, 40), (17, 20, 2)):
        got = case.select(first, last, k, operator=operator, vnni=vnni)
        assert got.dtype == np.int32
        assert np.array_equal(got, case.reference(first, last, k, operator))


@pytest.mark.parametrize("vnni", PATHS)
def test_extreme_codes_stay_exact(vnni: bool) -> None:
    """All codes at +-127 in 512 dimensions: the largest dots there are."""
    case = make_case(8, head_dim=512, positions=2)
    case.index.codes[:] = np.where(case.index.codes & 1, 127, 129)
    case.index.codes[:, :, :, ::3] = 127
    case.queries[:] = np.sign(case.queries)
    case.queries[:, 0] = 0
    case.queries[:, 0, :, 0] = 5
    assert np.array_equal(case.select(0, 96, 30, vnni=vnni), case.reference(0, 96, 30))


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
def test_independent_of_threads_and_of_page_placement(bits: int) -> None:
    keys = torch.randn(LAYERS, HEADS, 96, 16, generator=torch.Generator().manual_seed(1))
    here = make_case(bits, keys=keys, pages=np.arange(12, dtype=np.int32))
    there = make_case(bits, keys=keys, pages=np.arange(12, dtype=np.int32)[::-1] + 2)
    expected = here.select(3, 90, 20)
    for threads in (2, 3, 8):
        assert np.array_equal(here.select(3, 90, 20, num_threads=threads), expected)
    assert np.array_equal(there.select(3, 90, 20), expected)
    assert not np.array_equal(expected[0, 0], expected[1, 1])


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
def test_rows_outside_the_span_are_never_chosen_and_may_be_nan(bits: int) -> None:
    case = make_case(bits)
    first, last = 11, 77
    expected = case.select(first, last, 13)
    for position in [*range(first), *range(last, 96)]:
        page, slot = case.pages[position // PAGE], position % PAGE
        case.pool.rows[:, page, :, slot] = float("nan")
        if bits < 16:
            case.index.scales[:, page, :, slot] = np.nan
    case.pool.rows[..., 16:] = float("nan")
    if bits < 16:
        unused = np.setdiff1d(np.arange(15), case.pages)
        case.index.scales[:, unused] = np.nan
        case.index.means[:, unused] = np.nan
    got = case.select(first, last, 13)
    assert np.array_equal(got, expected)
    assert got.min() >= first
    assert got.max() < last
    assert (np.diff(got, axis=-1) > 0).all()


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
@pytest.mark.parametrize("operator", ["max", "sum"])
def test_finds_planted_needles(bits: int, operator: str) -> None:
    """Every position asks for a row of its own; each must be among the chosen, whatever the index."""
    rng = np.random.default_rng(3)
    case = make_case(bits, head_dim=64, positions=4, num_pages=40)
    needles = rng.permutation(320)[: 4 * HEADS * GROUP].reshape(4, HEADS * GROUP)
    keys = torch.randn(LAYERS, HEADS, 320, 64, generator=torch.Generator().manual_seed(3))
    for position in range(4):
        for head in range(HEADS * GROUP):
            keys[:, head // GROUP, needles[position, head]] = torch.from_numpy(
                case.queries[:, position, head] * 1.5
            )
    planted = make_case(bits, 64, 4, num_pages=40, keys=keys)
    planted.queries, planted.lse = case.queries, np.zeros_like(case.lse)
    found = planted.select(0, 320, 16, operator=operator)
    for head in range(HEADS):
        wanted = needles[:, head * GROUP : (head + 1) * GROUP].reshape(-1)
        for layer in range(LAYERS):
            assert np.isin(wanted, found[layer, head]).all()


@pytest.mark.parametrize(("bits", "least"), [(8, 0.95), (4, 0.75), (1, 0.35)])
def test_recall_against_exact(bits: int, least: float) -> None:
    keys = torch.randn(LAYERS, HEADS, 480, 64, generator=torch.Generator().manual_seed(5))
    exact, coded = (make_case(b, 64, 4, num_pages=60, keys=keys) for b in (16, bits))
    a, b = exact.select(0, 480, 48), coded.select(0, 480, 48)
    recall = np.mean([np.isin(x, y).mean() for x, y in zip(a.reshape(-1, 48), b.reshape(-1, 48))])
    assert recall >= least


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_the_mean_is_put_back(bits: int) -> None:
    """Pages that differ by their mean only: without it all pages would score alike."""
    keys = torch.randn(1, 1, PAGE, 16, generator=torch.Generator().manual_seed(0)).repeat(
        LAYERS, HEADS, 12, 1
    )
    shift = torch.zeros(16)
    shift[2] = 4.0
    keys[:, :, 3 * PAGE : 4 * PAGE] += shift
    case = make_case(bits, keys=keys)
    case.queries[:] = shift.numpy()
    assert (case.select(0, 96, PAGE) == np.arange(3 * PAGE, 4 * PAGE)).all()


def test_lse_is_taken_off_per_query() -> None:
    """A query that already sees much attention elsewhere counts for less."""
    keys = torch.zeros(LAYERS, HEADS, 96, 16)
    keys[:, :, 10, 0] = 4.0
    keys[:, :, 20, 1] = 4.0
    case = make_case(8, keys=keys, positions=2)
    case.queries[:] = 0
    case.queries[:, 0, :, 0] = 1.0
    case.queries[:, 1, :, 1] = 1.0
    case.lse[:, 0] = 3.0
    case.lse[:, 1] = 0.0
    assert (case.select(0, 96, 1) == 20).all()
    case.lse[:, 1] = 6.0
    assert (case.select(0, 96, 1) == 10).all()


def test_sum_counts_several_queries_and_max_does_not() -> None:
    keys = torch.zeros(LAYERS, HEADS, 96, 16)
    keys[:, :, 10, 0] = 4.0
    keys[:, :, 20, 1] = 3.8
    case = make_case(16, keys=keys, positions=6)
    case.queries[:] = 0
    case.lse[:] = 2.0
    case.queries[:, :5, :, 1] = 4.0
    case.queries[:, 5, :, 0] = 4.0
    assert (case.select(0, 96, 1, operator="max") == 10).all()
    assert (case.select(0, 96, 1, operator="sum") == 20).all()


def test_sum_is_the_log_of_the_sum_of_exponentials() -> None:
    case = make_case(16, positions=9)
    got = score_reference(
        case.pool, case.index, case.pages, 0, 96, case.queries, case.lse, case.scale, operator="sum"
    )
    keys = case.pool.rows[:, case.pages.astype(np.int64), :, :, :16].double()
    keys = keys.transpose(1, 2).reshape(LAYERS, HEADS, 96, 16)
    queries = torch.from_numpy(case.queries).double().view(LAYERS, 9, HEADS, GROUP, 16)
    lse = torch.from_numpy(case.lse).double().view(LAYERS, 9, HEADS, GROUP).permute(0, 2, 1, 3)
    scores = torch.einsum("lmhgd,lhnd->lhmgn", queries, keys) * case.scale - lse[..., None]
    assert np.allclose(got, scores.flatten(2, 3).logsumexp(2).numpy(), rtol=1e-5, atol=1e-5)


def test_edges_of_k_and_growing_calls() -> None:
    case = make_case(8)
    assert case.select(5, 5, 0).shape == (LAYERS, HEADS, 0)
    assert case.select(5, 50, 0).shape == (LAYERS, HEADS, 0)
    assert (case.select(5, 50, 45) == np.arange(5, 50)).all()
    selector = Selector(case.pool, case.index, num_threads=2)
    for last, positions in ((20, 5), (96, 5), (40, 2), (90, 4)):
        queries, lse = case.queries[:, :positions], case.lse[:, :positions]
        got = selector.select(case.pages, 2, last, 6, queries, lse, case.scale)
        expected = select_reference(case.pool, case.index, case.pages, 2, last, 6, queries, lse, case.scale)
        assert np.array_equal(got, expected)
    selector.close()
    selector.close()


def test_nan_queries_do_not_break_the_contract() -> None:
    case = make_case(8)
    case.queries[0, :, 0] = np.nan
    case.lse[0, 1, 1] = np.inf
    got = case.select(5, 60, 20)
    assert (np.diff(got, axis=-1) > 0).all()
    assert got.min() >= 5
    assert got.max() < 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last": 97}, "0 to 96"),
        ({"first": -1}, "0 to 96"),
        ({"k": 91}, "0 to 90"),
        ({"pages": np.full(12, 15, np.int32)}, "0 to 14"),
        ({"queries": np.zeros((LAYERS, 5, 5, 16), np.float32)}, "multiple of 2"),
        ({"queries": np.zeros((LAYERS, 5, 6, 8), np.float32)}, "multiple of 2, 16"),
        ({"lse": np.zeros((LAYERS, 4, 6), np.float32)}, r"\(2, 5, 6\)"),
    ],
)
def test_refusals_name_what_works(change: dict[str, object], message: str) -> None:
    case = make_case(8)
    arguments = {
        "pages": case.pages,
        "first": 0,
        "last": 90,
        "k": 4,
        "queries": case.queries,
        "lse": case.lse,
        **change,
    }
    with pytest.raises(UsageError, match=message):
        Selector(case.pool, case.index, num_threads=1).select(*arguments.values(), case.scale)  # type: ignore


def test_bad_options() -> None:
    case = make_case(8)
    with pytest.raises(InvalidOption, match="operator"):
        Selector(case.pool, case.index, operator="mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="num_threads"):
        Selector(case.pool, case.index, num_threads=-1)

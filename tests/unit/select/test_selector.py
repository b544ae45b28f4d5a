"""The selector against plain references: exact sets, ties, recall, independence of threads and pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from herald.errors import InvalidOption, UsageError
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.kvstore.native import find_native
from herald.select import Selector, select_reference
from herald.select.reference import score_reference, top_k_reference
from herald.select.tiles import HAS_VNNI

LAYERS, HEADS, GROUP, PAGE = 2, 2, 3, 8


def native_missing(isa: str) -> str:
    """Why the extension cannot scan with ``isa`` here, or ""."""
    native = find_native()
    if native.module is None:
        return native.reason
    try:
        native.module.scan_isa(isa)
    except ValueError as error:
        return str(error)
    return ""


NATIVE_ISAS = ("amx", "amx_emulated", "vnni", "avx2", "scalar")
NUMBA_PATHS = [
    ("numba", "float"),
    pytest.param(("numba", "vnni"), marks=pytest.mark.skipif(not HAS_VNNI, reason="needs AVX-512 VNNI")),
]
NATIVE_PATHS = [
    pytest.param(
        ("native", isa), marks=pytest.mark.skipif(bool(native_missing(isa)), reason=native_missing(isa))
    )
    for isa in NATIVE_ISAS
]
PATHS = [*NUMBA_PATHS, *NATIVE_PATHS]


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

    def scores(self, first: int, last: int) -> np.ndarray:
        arguments = (self.pool, self.index, self.pages, first, last, self.queries, self.lse, self.scale)
        return score_reference(*arguments)

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
    page_size: int = PAGE,
) -> Case:
    """Unused pages of the pool hold NaN. ``keys`` [L, H, rows, D] or random."""
    rng = np.random.default_rng(head_dim * 100 + positions)
    pool = HostPool(RowLayout(LAYERS, HEADS, head_dim, page_size, dtype), num_pages + 3, pin=False)
    pool.rows.fill_(float("nan"))
    if pages is None:
        pages = rng.permutation(num_pages + 3)[:num_pages].astype(np.int32)
    if keys is None:
        keys = torch.from_numpy(rng.standard_normal((LAYERS, HEADS, num_pages * page_size, head_dim)) + 0.5)
    for i, page in enumerate(pages):
        pool.rows[:, page, :, :, :head_dim] = keys[:, :, i * page_size : (i + 1) * page_size].to(dtype)
    index = KeyIndex(pool, bits)  # type: ignore[arg-type]
    index.append_span(pages, 0, num_pages * page_size)
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


@pytest.mark.parametrize("path", NUMBA_PATHS, ids="-".join)
@pytest.mark.parametrize("operator", ["max", "sum"])
@pytest.mark.parametrize("bits", [16, 8, 4, 1])
@pytest.mark.parametrize(("head_dim", "positions"), [(16, 1), (24, 5), (64, 16), (32, 27)])
def test_numba_equals_the_reference_exactly(
    head_dim: int, positions: int, bits: int, operator: str, path: tuple[str, str]
) -> None:
    """Widths of 1, 1, 3 and 6 vectors of queries: every tile variant, with padding."""
    case = make_case(bits, head_dim, positions)
    for first, last, k in ((0, 96, 9), (3, 85, 40), (17, 20, 2)):
        got = case.select(first, last, k, operator=operator, backend=path[0], isa=path[1])
        assert got.dtype == np.int32
        assert np.array_equal(got, case.reference(first, last, k, operator))


@pytest.mark.parametrize("path", NATIVE_PATHS, ids="-".join)
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize(
    ("head_dim", "positions"), [(16, 1), (24, 5), (64, 16), (32, 27), (128, 43), (200, 6), (128, 22)]
)
def test_native_equals_the_reference_exactly(
    head_dim: int, positions: int, page_size: int, bits: int, path: tuple[str, str]
) -> None:
    """Pages of half a tile of rows, one and four; 1 to 9 vectors of queries; 1 to 4 tiles of dimensions."""
    case = make_case(bits, head_dim, positions, num_pages=128 // page_size + 1, page_size=page_size)
    for first, last, k in ((0, 128, 9), (3, 121, 40), (17, 20, 2)):
        got = case.select(first, last, k, backend=path[0], isa=path[1])
        assert got.dtype == np.int32
        assert np.array_equal(got, case.reference(first, last, k))


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_extreme_codes_stay_exact(path: tuple[str, str]) -> None:
    """All codes at +-127 in 512 dimensions: the largest dots there are."""
    case = make_case(8, head_dim=512, positions=2)
    case.index.codes[:] = np.where(case.index.codes & 1, 127, 129)
    case.index.codes[:, :, :, ::3] = 127
    case.index.mean_codes[:, :, :, 0] = np.where(case.index.mean_codes[:, :, :, 0] & 1, 127, -127)
    case.index.mean_codes[:, :, :, 1] = -64
    case.queries[:] = np.sign(case.queries)
    case.queries[:, 0] = 0
    case.queries[:, 0, :, 0] = 5
    got = case.select(0, 96, 30, backend=path[0], isa=path[1])
    assert np.array_equal(got, case.reference(0, 96, 30))


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("k", [1, 700, 5000, 8191])
def test_long_spans_with_ties(k: int, path: tuple[str, str]) -> None:
    """Long enough that the threshold is bracketed by a sample; keys repeat, so that it falls among equals."""
    generator = torch.Generator().manual_seed(k)
    keys = torch.randn(LAYERS, HEADS, 320, 16, generator=generator).repeat(1, 1, 26, 1)[:, :, :8192]
    case = make_case(8, num_pages=1024, keys=keys, pages=np.arange(1024, dtype=np.int32))
    case.index.mean_codes[:] = 0  # equal rows of different pages would not score alike
    case.index.page_scales[:] = 0.01
    case.index.codes[:] = np.resize(case.index.codes[:, :40], case.index.codes.shape)
    scores = case.scores(0, 8192)
    assert len(np.unique(scores[0, 0])) < 8192
    expected = [top_k_reference(row, k, 0) for row in scores.reshape(-1, 8192)]
    got = case.select(0, 8192, k, backend=path[0], isa=path[1])
    assert np.array_equal(got.reshape(-1, k), expected)


@pytest.mark.parametrize("path", NATIVE_PATHS, ids="-".join)
@pytest.mark.parametrize("order", ["rising", "falling", "strided"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_sample_that_misleads(bits: int, order: str, path: tuple[str, str]) -> None:
    """Scores in an order that the sample of every n-th row cannot stand for."""
    case = make_case(bits, positions=1, num_pages=1024, keys=torch.zeros(LAYERS, HEADS, 8192, 16))
    size = np.arange(8192, dtype=np.float32)
    size = {"rising": size, "falling": size[::-1], "strided": (size % 8 == 0) * -1e4 + size}[order] + 1
    size = size.reshape(1, 1024, 1, PAGE)
    pages = case.pages.astype(np.int64)
    case.index.codes[:] = 127 if bits == 8 else 0xFF
    case.index.mean_codes[:] = 0
    if bits == 8:
        case.index.page_scales[..., 0][:, pages] = size.mean(axis=3)
    else:
        case.index.row_scales[:, pages] = np.broadcast_to(size, (LAYERS, 1024, HEADS, PAGE))
    case.queries[:] = case.index.signs[:16]
    for k in (1, 9, 1024, 5000):
        got = case.select(0, 8192, k, backend=path[0], isa=path[1])
        assert np.array_equal(got, case.select(0, 8192, k, backend="numba"))


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_units_so_small_that_starts_are_clamped(bits: int, path: tuple[str, str]) -> None:
    """Pages of keys 1e-12 as large as others': a unit is far below the distance of the queries' lse."""
    keys = torch.randn(LAYERS, HEADS, 96, 16, generator=torch.Generator().manual_seed(2))
    keys[:, :, 24:48] *= 1e-12
    keys[:, :, 48:56] = 0
    case = make_case(bits, keys=keys, positions=6)
    case.lse[:, 1:3] += 5
    case.lse[:, 3] += 500
    case.lse[:, 4] = 3e38
    for k in (1, 20, 60):
        got = case.select(0, 96, k, backend=path[0], isa=path[1])
        assert np.array_equal(got, case.reference(0, 96, k))
    exact = exact_scores(case, 0, 96)
    # The rows of the small pages all score about -lse of the best query: they stand between the others.
    scores = torch.from_numpy(case.scores(0, 96))
    offset = case.lse.reshape(LAYERS, 6, HEADS, GROUP).min(axis=(1, 3))
    tolerance = {8: 0.06, 4: 0.5, 1: 2.0}[bits]
    assert torch.allclose(scores - torch.from_numpy(offset)[..., None], exact, atol=tolerance)


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("bits", [16, 8])
def test_bfloat16_queries_are_the_floats_they_stand_for(bits: int, path: tuple[str, str]) -> None:
    if bits == 16 and path[0] == "native":
        pytest.skip("scanned by numba")
    case = make_case(bits, positions=7)
    rounded = torch.from_numpy(case.queries).bfloat16()
    case.queries = rounded.float().numpy()
    expected = case.select(3, 90, 20, backend=path[0], isa=path[1])
    case.queries = rounded.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(case.select(3, 90, 20, backend=path[0], isa=path[1]), expected)


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("operator", ["max", "sum"])
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_queries_of_zeros_find_all_rows_alike(bits: int, operator: str, path: tuple[str, str]) -> None:
    if operator == "sum" and path[0] == "native":
        pytest.skip("scanned by numba")
    case = make_case(bits)
    case.queries[:] = 0
    got = case.select(5, 90, 11, operator=operator, backend=path[0], isa=path[1])
    assert (got == np.arange(5, 16)).all()


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_without_a_query_that_counts_the_choice_is_still_valid(bits: int, path: tuple[str, str]) -> None:
    case = make_case(bits)
    case.lse[:] = np.inf
    got = case.select(5, 90, 11, backend=path[0], isa=path[1])
    assert np.array_equal(got, case.reference(5, 90, 11))


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_a_query_with_infinite_lse_does_not_count(path: tuple[str, str]) -> None:
    case = make_case(8, positions=6)
    case.lse[:, 2:] = np.inf
    case.queries[:, 2:] *= 100
    got = case.select(3, 90, 20, backend=path[0], isa=path[1])
    case.queries, case.lse = case.queries[:, :2], case.lse[:, :2]
    assert np.array_equal(got, case.reference(3, 90, 20))


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
        if bits < 8:
            case.index.row_scales[:, page, :, slot] = np.nan
    case.pool.rows[..., 16:] = float("nan")
    if bits < 16:
        unused = np.setdiff1d(np.arange(15), case.pages[first // PAGE : -(-last // PAGE)])
        case.index.row_scales[:, unused] = np.nan
        case.index.page_scales[:, unused] = np.nan
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


def mass_of(scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Share of the softmax over all rows that falls on the chosen ones, [L, H]."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.take_along_axis(weights, chosen, axis=-1).sum(axis=-1) / weights.sum(axis=-1)


@pytest.mark.parametrize("block", [4, 32])
def test_one_scale_a_page_finds_the_mass_that_exact_keys_find(block: int) -> None:
    """Keys with outlier channels, of norms that vary by two within a page and grow after its first block.

    The best twentieth by exact keys holds a share of the softmax; what the index of 8 bits chooses holds at
    least 99 % of that.
    """
    rng = np.random.default_rng(block)
    rows, head_dim, page = 2048, 128, 64
    keys = rng.standard_normal((LAYERS, HEADS, rows, head_dim))
    keys *= rng.uniform(0.7, 1.4, (LAYERS, HEADS, rows, 1))
    keys[..., [3, 40, 77]] = keys[..., [3, 40, 77]] * 6 + np.array([25.0, -18.0, 9.0])
    keys += (
        rng.standard_normal((LAYERS, HEADS, rows // page, 1, head_dim)).repeat(page, 3).reshape(keys.shape)
    )
    later = np.arange(rows) % page >= block
    keys[:, :, later] *= 1.3
    pages = rng.permutation(rows // page + 3)[: rows // page].astype(np.int32)
    case = make_case(
        8, head_dim, 8, torch.bfloat16, rows // page, torch.from_numpy(keys), pages, page_size=page
    )
    case.queries *= rng.uniform(0.5, 2.0, (LAYERS, 8, HEADS * GROUP, 1)).astype(np.float32)
    for number in pages:
        for start in range(0, page, block):
            case.index.append_block(int(number), start, block)
    k = rows // 20
    scores = exact_scores(case, 0, rows).numpy()
    best = torch_top_k(torch.from_numpy(scores), k, 0)
    found = case.select(0, rows, k)
    assert (mass_of(scores, found) >= 0.99 * mass_of(scores, best)).all()


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


def test_says_what_scans_and_why() -> None:
    case, native = make_case(8), find_native()
    selector = Selector(case.pool, case.index, num_threads=1, backend="numba")
    assert (selector.backend, selector.reason) == ("numba", "")
    assert selector.isa == ("vnni" if HAS_VNNI else "float")
    selector = Selector(case.pool, case.index, num_threads=1)
    if native.module is None:
        assert (selector.backend, selector.reason) == ("numba", native.reason)
    else:
        usable = [name for name, why in native.module.scan_isas().items() if not why]
        assert (selector.backend, selector.isa) == ("native", usable[0])
        assert bool(selector.reason) == ("amx" not in usable)
    for bits, operator, word in ((16, "max", "index_bits=16"), (8, "sum", "score_operator='sum'")):
        case = make_case(bits)
        selector = Selector(case.pool, case.index, operator, num_threads=1)  # type: ignore[arg-type]
        assert selector.backend == "numba"
        assert word in selector.reason
        with pytest.raises(UsageError, match="backend='auto'"):
            Selector(case.pool, case.index, operator, backend="native")  # type: ignore[arg-type]


def test_bad_options() -> None:
    case = make_case(8)
    with pytest.raises(InvalidOption, match="auto, native, numba"):
        Selector(case.pool, case.index, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="auto, vnni, float"):
        Selector(case.pool, case.index, backend="numba", isa="sse9")
    with pytest.raises(UsageError, match="isa"):
        Selector(case.pool, case.index, isa="sse9")
    with pytest.raises(InvalidOption, match="operator"):
        Selector(case.pool, case.index, operator="mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="num_threads"):
        Selector(case.pool, case.index, num_threads=-1)

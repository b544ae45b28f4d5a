"""`score_codes` against integers computed one by one, and against the CPU's selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herald_kernels import score_codes
from tests.kernels.support import EVERYWHERE, Draw, Target

CASES = [
    # pages, KV heads, page size, n, queries
    (1, 1, 8, 16, 16),
    (3, 2, 64, 128, 128),
    (5, 2, 32, 64, 48),
    (9, 3, 24, 32, 16),
    (2, 1, 96, 128, 144),
    (33, 1, 16, 64, 512),
]
# The integer types of the inputs do not depend on the target's dtype.
TARGETS = [target for target in EVERYWHERE if "bf16" not in str(target.id)]


class Case:
    """Random codes, scales and queries on a device."""

    def __init__(self, target: Target, shape: tuple[int, int, int, int, int], bits: int = 8) -> None:
        pages, heads, size, n, width = shape
        draw = Draw(target, sum(shape))
        self.codes = draw.integers(0, 256, pages, heads, size, n * bits // 8).to(torch.uint8)
        self.row_scales = None
        if bits == 4:
            self.row_scales = draw.integers(1, 1000, pages, heads, size).float() / 3e4
        self.mean_codes = draw.integers(-127, 128, pages, heads, 2, n).to(torch.int8)
        self.page_scales = draw.integers(1, 1000, pages, heads, 2).float() / 3e4
        self.query_codes = draw.integers(-127, 128, heads, width, n).to(torch.int8)
        self.lead = -draw.integers(0, 1000, heads, width).float() / 70
        self.reach = draw.integers(1, 100, heads).float() / 3e4
        self.lead[:, -3:] = float("-inf")

    def rows(self) -> np.ndarray:
        """The codes, one number a dimension."""
        codes = self.codes.cpu().numpy()
        if self.row_scales is None:
            return codes.view(np.int8).astype(np.int64)
        return np.concatenate([codes & 15, codes >> 4], -1).astype(np.int64) - 8

    def arguments(self) -> list[torch.Tensor | None]:
        """All before the span."""
        queries = (self.query_codes, self.lead, self.reach)
        return [self.codes, self.row_scales, self.mean_codes, self.page_scales, *queries]

    def starts(self) -> torch.Tensor:
        (pages, heads), width = self.codes.shape[:2], self.query_codes.shape[1]
        kind = torch.int32 if self.row_scales is None else torch.float32
        return torch.empty(heads, pages, width, dtype=kind, device=self.codes.device)

    def keys(self, target: Target, spare: int = 0, pieces: int = 1) -> torch.Tensor:
        """Keys [H, rows + spare], made in ``pieces`` spans whose codes lie in memory for more pages."""
        pages, heads, size, _ = self.codes.shape
        stride = pages * size + spare
        keys = torch.full((heads * stride,), 77, dtype=torch.int32, device=target.device)
        arguments, step = self.arguments(), -(-pages // pieces)
        for first in range(0, pages, step):
            count = min(step, pages - first)
            held = torch.full_like(self.codes, 99)
            held[:count] = self.codes[first : first + count]
            span = torch.tensor([first, count, stride, 0], dtype=torch.int32, device=target.device)
            score_codes(held, *arguments[1:], span, self.starts(), keys)
        return keys.view(heads, stride)

    def keys_by_table(self, target: Target, base: int) -> torch.Tensor:
        """Keys [H, rows] where the pages lie in another order, ``base`` pages into a larger index."""
        pages, heads, size, _ = self.codes.shape
        order = torch.arange(pages, device=target.device).roll(pages // 2).flip(0)

        def scattered(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None:
                return None
            wider = values.new_full((base + pages + 2, *values.shape[1:]), 55)
            wider[base + order] = values
            return wider

        codes, row_scales, means, scales, *queries = self.arguments()
        keys = torch.full((heads * pages * size,), 77, dtype=torch.int32, device=target.device)
        span = torch.tensor([0, pages, pages * size, base], dtype=torch.int32, device=target.device)
        held = (scattered(codes), scattered(row_scales), scattered(means), scattered(scales))
        score_codes(*held, *queries, span, self.starts(), keys, order.int())
        return keys.view(heads, -1)

    def expected(self) -> np.ndarray:
        """Order keys by numpy, with the roundings that herald/select/scan.py asks for."""
        codes, means = self.rows(), self.mean_codes.cpu().numpy().astype(np.int64)
        queries = self.query_codes.cpu().numpy().astype(np.int64)
        scales, lead, reach = (x.cpu().numpy() for x in (self.page_scales, self.lead, self.reach))
        pages, heads, size, _ = codes.shape
        out = np.empty((heads, pages, size), np.int32)
        for head in range(heads):
            for page in range(pages):
                of_mean = queries[head] @ means[page, head].T
                dot = (128 * of_mean[:, 0] + of_mean[:, 1]).astype(np.float32)
                unit = reach[head] * scales[page, head, 1]
                shift = (dot.astype(np.longdouble) * unit + lead[head]).astype(np.float32)
                dots = codes[page, head] @ queries[head].T
                if self.row_scales is not None:
                    unit = reach[head] * self.row_scales[page, head].cpu().numpy()
                    scores = dots.astype(np.longdouble) * unit[:, None] + shift
                    out[head, page] = order_keys(scores.astype(np.float32).max(1))
                    continue
                unit = reach[head] * scales[page, head, 0]
                start = np.clip(shift * (np.float32(1) / unit), -(2.0**30), 2.0**30)
                sums = dots + np.rint(start).astype(np.int64)
                out[head, page] = order_keys(sums.max(1).astype(np.float32) * unit)
        return out.reshape(heads, pages * size)


def order_keys(scores: np.ndarray) -> np.ndarray:
    bits = (scores + np.float32(0)).view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_keys_are_those_of_the_formula(
    target: Target, bits: int, shape: tuple[int, int, int, int, int]
) -> None:
    case = Case(target, shape, bits)
    keys, expected = case.keys(target).cpu().numpy(), case.expected()
    if target.backend == "triton" and target.device == "cpu":
        # The interpreter's fma rounds twice: a start may be off by one unit of its page.
        score, close = (x.astype(np.int64) for x in (keys, expected))
        assert (np.abs(score - close) > 64).mean() < 0.01
        assert np.corrcoef(keys.ravel(), expected.ravel())[0, 1] > 0.999
    else:
        assert np.array_equal(keys, expected)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_pieces_write_their_rows_only(target: Target, bits: int, pieces: int) -> None:
    case = Case(target, CASES[3], bits)
    keys = case.keys(target, spare=5, pieces=pieces)
    assert (keys[:, -5:] == 77).all()
    assert torch.equal(keys[:, :-5], case.keys(target))


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("shape", CASES[2:4], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_pages_where_a_table_says(target: Target, bits: int, shape: tuple[int, ...]) -> None:
    case = Case(target, shape, bits)  # type: ignore[arg-type]
    for base in (0, 3):
        assert torch.equal(case.keys_by_table(target, base), case.keys(target))


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_pages_without_scale_and_queries_that_do_not_count(target: Target) -> None:
    """A page of zeros has unit 0: all its scores are 0. Without a query that counts, scores are far below."""
    case = Case(target, CASES[1])
    case.page_scales[1] = 0
    keys = case.keys(target)
    assert (keys[:, 64:128] == 0).all()
    case = Case(target, CASES[1])
    before = case.keys(target)
    case.lead[0] = float("-inf")
    after = case.keys(target)
    assert torch.equal(before[1], after[1])
    assert (after[0] < before[0]).all()


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("shape", [CASES[2], CASES[4]], ids=str)
def test_queries_that_only_fill_a_tile_have_no_say(target: Target, shape: tuple[int, ...]) -> None:
    """48 queries in a tile of 64, 144 in two of 128: also where none of them counts."""
    case = Case(target, shape)  # type: ignore[arg-type]
    case.lead[:] = float("-inf")
    case.codes[:] = 129  # -127: against positive queries every sum is below that of an empty one
    case.query_codes.abs_().clamp_(1)
    assert np.array_equal(case.keys(target).cpu().numpy(), case.expected())


def test_shapes_are_checked() -> None:
    case = Case(EVERYWHERE[0].values[0], CASES[1])  # type: ignore[arg-type]
    given = dict(
        zip(
            ("codes", "row_scales", "mean_codes", "page_scales", "query_codes", "lead", "reach"),
            case.arguments(),
            strict=True,
        ),
        span=torch.tensor([0, 3, 192, 0], dtype=torch.int32),
        starts=case.starts(),
        keys=torch.zeros(2 * 192, dtype=torch.int32),
    )
    score_codes(**given)
    for name, wrong, problem in [
        ("lead", case.lead[:1], "lead has shape"),
        ("span", torch.zeros(2, dtype=torch.int32), "span has shape"),
        ("starts", torch.empty(2, 9, 128, dtype=torch.int32), "starts has room for 9 pages; use 3"),
        ("table", torch.zeros(2, dtype=torch.int32), "table has shape"),
        ("starts", case.starts().float(), "starts has dtype torch.float32; use torch.int32"),
        ("keys", torch.zeros(4, 192, dtype=torch.int32)[::2].flatten()[::2], "keys must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=problem):
            score_codes(**(given | {name: wrong}))

# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `score_codes`: one makes what sums of a page and query begin with, the other the dots.

With 8 bits sums begin with an integer, with 4 with a float. Keys are the left operand and queries the right
one, both contiguous in n, as the int8 products of Hopper want them; the largest of a row never leaves the
registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Pages whose starts a program makes, and pages whose rows it scores.
START_PAGES = 32
PAGES = 8
MAX_ROWS, MAX_WIDTH = 64, 128
# Tiles of rows under way, of rows up to WIDE bytes.
STAGES, WIDE = 3, 128


@triton.jit
def _round_to_even(value):
    """rint for any float32, without a library: beyond 2 ** 23 every value is an integer."""
    LARGE: tl.constexpr = 8388608.0
    size = tl.abs(value)
    rounded = (size + LARGE) - LARGE
    rounded = tl.where(size < LARGE, rounded, size)
    return tl.where(value < 0, -rounded, rounded)


@triton.jit
def _load_codes(base, first, limit, stride, column, N, COUNT: tl.constexpr, DIM: tl.constexpr):
    """Bytes [COUNT, DIM] of rows ``first ..`` and N columns from ``column`` of a matrix [limit, stride]."""
    row = first + tl.arange(0, COUNT)
    d = tl.arange(0, DIM)
    inside = (row < limit)[:, None] & (d < N)[None, :]
    return tl.load(base + row[:, None].to(tl.int64) * stride + column + d[None, :], mask=inside, other=0)


@triton.jit
def _starts_kernel(
    mean_codes, page_scales, query_codes, lead, reach, span, table, starts, most, heads, width, N,
    PAGED: tl.constexpr, PAGES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    FARTHEST: tl.constexpr = 1073741824.0
    head = tl.program_id(1)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    first = tl.program_id(2) * WIDTH
    q = first + tl.arange(0, WIDTH)
    d = tl.arange(0, DIM)
    num_pages = tl.load(span + 1)
    if tl.program_id(0) * PAGES >= num_pages:
        return
    where = tl.load(span) + page
    if PAGED:
        where = tl.load(table + where, mask=page < num_pages, other=0) + tl.load(span + 3)
    block = where.to(tl.int64) * heads + head
    inside = (page < num_pages)[:, None] & (d < N)[None, :]
    at = mean_codes + block[:, None] * (2 * N) + d[None, :]
    high = tl.load(at, mask=inside, other=0)
    low = tl.load(at + N, mask=inside, other=0)
    queries = query_codes + head.to(tl.int64) * width * N
    query = tl.trans(_load_codes(queries, first, width, N, 0, N, WIDTH, DIM))
    dot = 128 * tl.dot(high, query, out_dtype=tl.int32) + tl.dot(low, query, out_dtype=tl.int32)
    of_head = tl.load(reach + head)
    unit = of_head * tl.load(page_scales + 2 * block + 1, mask=page < num_pages, other=0.0)
    ahead = tl.load(lead + head * width + q, mask=q < width, other=float("-inf"))
    product, ahead = tl.broadcast(dot.to(tl.float32), ahead[None, :])
    unit, _ = tl.broadcast(unit[:, None], product)
    start = tl.fma(product, unit, ahead)
    if BITS == 8:
        unit = of_head * tl.load(page_scales + 2 * block, mask=page < num_pages, other=0.0)
        start = start * tl.math.div_rn(tl.full([PAGES], 1.0, tl.float32), unit)[:, None]
        # comparisons with NaN are false: it starts at the far end
        start = tl.where(start > -FARTHEST, start, -FARTHEST)
        start = tl.where(start < FARTHEST, start, FARTHEST)
        start = _round_to_even(start).to(tl.int32)
    else:
        start = tl.where(start != start, float("-inf"), start)
    to = starts + (head.to(tl.int64) * most + page[:, None]) * width + q[None, :]
    tl.store(to, start, mask=(page < num_pages)[:, None] & (q < width)[None, :])


@triton.jit
def _keys_kernel(
    codes, row_scales, starts, page_scales, query_codes, reach, span, table, keys, most, heads, width, N,
    size, PAGED: tl.constexpr, PAGES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -2147483648
    LEAST: tl.constexpr = float("-inf")
    head = tl.program_id(1)
    num_pages = tl.load(span + 1)
    if tl.program_id(0) * PAGES >= num_pages:
        return
    first = tl.load(span)
    stride, base = tl.load(span + 2).to(tl.int64), tl.load(span + 3)
    queries = query_codes + head.to(tl.int64) * width * N
    row_bytes = N * BITS // 8
    of_head = tl.load(reach + head)
    # With 4 bits a byte holds dimensions i and i + N / 2: two products of half the depth.
    query = tl.trans(_load_codes(queries, 0, width, N, 0, row_bytes, WIDTH, DIM))
    upper = query
    if BITS == 4:
        upper = tl.trans(_load_codes(queries, 0, width, N, row_bytes, row_bytes, WIDTH, DIM))
    # A bound instead of a condition, so that the next page is fetched while this one is multiplied.
    pages_here = tl.minimum(PAGES, num_pages - tl.program_id(0) * PAGES)
    for step in tl.range(0, pages_here * PARTS, num_stages=STAGES):
        page = tl.program_id(0) * PAGES + step // PARTS
        row = (step % PARTS) * ROWS
        where = first + page
        held = page
        if PAGED:
            where = base + tl.load(table + where)
            held = where
        block = where.to(tl.int64) * heads + head
        held = held.to(tl.int64) * heads + head
        rows = _load_codes(codes + held * size * row_bytes, row, size, row_bytes, 0, row_bytes, ROWS, DIM)
        within = row + tl.arange(0, ROWS)
        largest = tl.full([ROWS], LOWEST, tl.int32)
        score = tl.full([ROWS], LEAST, tl.float32)
        if BITS == 8:
            low = rows.to(tl.int8, bitcast=True)
            unit = tl.full([ROWS], 0.0, tl.float32) + of_head * tl.load(page_scales + 2 * block)
            high = low
        else:
            low = (rows & 15).to(tl.int8) - 8
            high = (rows >> 4).to(tl.int8) - 8
            scale = tl.load(row_scales + block * size + within, mask=within < size, other=0.0)
            unit = of_head * scale
        for chunk in tl.static_range(CHUNKS):
            if CHUNKS > 1:
                query = tl.trans(_load_codes(queries, chunk * WIDTH, width, N, 0, row_bytes, WIDTH, DIM))
            q = chunk * WIDTH + tl.arange(0, WIDTH)
            of_page = starts + (head.to(tl.int64) * most + page) * width + q
            dots = tl.dot(low, query, out_dtype=tl.int32)
            if BITS == 8:
                start = tl.load(of_page, mask=q < width, other=LOWEST)  # beyond all queries
                largest = tl.maximum(largest, tl.max(dots + start[None, :], 1))
            else:
                if CHUNKS > 1:
                    upper = tl.trans(
                        _load_codes(queries, chunk * WIDTH, width, N, row_bytes, row_bytes, WIDTH, DIM)
                    )
                dots = tl.dot(high, upper, dots, out_dtype=tl.int32)
                start = tl.load(of_page, mask=q < width, other=LEAST)
                product, shift = tl.broadcast(dots.to(tl.float32), start[None, :])
                by, _ = tl.broadcast(unit[:, None], product)
                score = tl.maximum(score, tl.max(tl.fma(product, by, shift), 1))
        if BITS == 8:
            score = largest.to(tl.float32) * unit
        bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
        key = tl.where(score != score, LOWEST, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        to = keys + head.to(tl.int64) * stride + (first + page).to(tl.int64) * size + within
        tl.store(to, key, mask=within < size)


def score_codes(
    codes: torch.Tensor,
    row_scales: torch.Tensor | None,
    mean_codes: torch.Tensor,
    page_scales: torch.Tensor,
    query_codes: torch.Tensor,
    lead: torch.Tensor,
    reach: torch.Tensor,
    span: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor | None = None,
) -> None:
    """See `herald_kernels.score_codes`."""
    heads, size, row_bytes = codes.shape[1:]
    width, n = query_codes.shape[1:]
    most = starts.shape[1]
    bits = 8 if row_scales is None else 4
    block = min(MAX_WIDTH, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, block)
    rows = max(16, min(MAX_ROWS, triton.next_power_of_2(size)))
    paged = table is not None
    pages = table if table is not None else span
    _starts_kernel[(triton.cdiv(most, START_PAGES), heads, chunks)](
        mean_codes, page_scales, query_codes, lead, reach, span, pages, starts, most, heads, width, n,
        PAGED=paged, PAGES=START_PAGES, WIDTH=block, DIM=max(n, 32), BITS=bits, num_warps=4,
    )  # fmt: skip
    _keys_kernel[(triton.cdiv(most, PAGES), heads)](
        codes, reach if row_scales is None else row_scales, starts, page_scales, query_codes, reach, span,
        pages, keys, most, heads, width, n, size, PAGED=paged, PAGES=PAGES, ROWS=rows,
        PARTS=triton.cdiv(size, rows), WIDTH=block, CHUNKS=chunks, DIM=max(row_bytes, 32), BITS=bits,
        STAGES=STAGES if row_bytes <= WIDE else 1, num_warps=4,
    )  # fmt: skip

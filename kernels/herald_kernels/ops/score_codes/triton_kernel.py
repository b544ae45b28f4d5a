# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `score_codes`: one makes the starts of every page and query, the other the dots.

Keys are the left operand and queries the right one, both contiguous in n, as the int8 products of Hopper want
them; the largest of a row never leaves the registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Pages whose starts a program makes, and pages whose rows it scores.
START_PAGES = 32
PAGES = 8
MAX_ROWS, MAX_WIDTH = 64, 128


@triton.jit
def _round_to_even(value):
    """rint for any float32, without a library: beyond 2 ** 23 every value is an integer."""
    LARGE: tl.constexpr = 8388608.0
    size = tl.abs(value)
    rounded = (size + LARGE) - LARGE
    rounded = tl.where(size < LARGE, rounded, size)
    return tl.where(value < 0, -rounded, rounded)


@triton.jit
def _load_codes(base, first, limit, N, COUNT: tl.constexpr, DIM: tl.constexpr):
    """int8 [COUNT, DIM] of rows ``first ..`` of a matrix [limit, N]; 0 outside."""
    row = first + tl.arange(0, COUNT)
    d = tl.arange(0, DIM)
    inside = (row < limit)[:, None] & (d < N)[None, :]
    return tl.load(base + row[:, None].to(tl.int64) * N + d[None, :], mask=inside, other=0)


@triton.jit(do_not_specialize=["num_pages"])
def _starts_kernel(
    mean_codes, page_scales, query_codes, lead, reach, starts, num_pages, heads, width, N,
    PAGES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    FARTHEST: tl.constexpr = 1073741824.0
    head = tl.program_id(1)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    first = tl.program_id(2) * WIDTH
    q = first + tl.arange(0, WIDTH)
    d = tl.arange(0, DIM)
    block = page.to(tl.int64) * heads + head
    inside = (page < num_pages)[:, None] & (d < N)[None, :]
    at = mean_codes + block[:, None] * (2 * N) + d[None, :]
    high = tl.load(at, mask=inside, other=0)
    low = tl.load(at + N, mask=inside, other=0)
    query = tl.trans(_load_codes(query_codes + head.to(tl.int64) * width * N, first, width, N, WIDTH, DIM))
    dot = 128 * tl.dot(high, query, out_dtype=tl.int32) + tl.dot(low, query, out_dtype=tl.int32)
    of_head = tl.load(reach + head)
    unit = of_head * tl.load(page_scales + 2 * block + 1, mask=page < num_pages, other=0.0)
    ahead = tl.load(lead + head * width + q, mask=q < width, other=float("-inf"))
    product, ahead = tl.broadcast(dot.to(tl.float32), ahead[None, :])
    unit, _ = tl.broadcast(unit[:, None], product)
    shift = tl.fma(product, unit, ahead)
    unit = of_head * tl.load(page_scales + 2 * block, mask=page < num_pages, other=0.0)
    start = shift * tl.math.div_rn(tl.full([PAGES], 1.0, tl.float32), unit)[:, None]
    # comparisons with NaN are false: it starts at the far end
    start = tl.where(start > -FARTHEST, start, -FARTHEST)
    start = tl.where(start < FARTHEST, start, FARTHEST)
    to = starts + (head.to(tl.int64) * num_pages + page[:, None]) * width + q[None, :]
    inside = (page < num_pages)[:, None] & (q < width)[None, :]
    tl.store(to, _round_to_even(start).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_pages", "stride", "first_key"])
def _keys_kernel(
    codes, starts, page_scales, query_codes, reach, keys, num_pages, heads, width, N, size, stride, first_key,
    PAGES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -2147483648
    head = tl.program_id(1)
    queries = query_codes + head.to(tl.int64) * width * N
    of_head = tl.load(reach + head)
    query = tl.trans(_load_codes(queries, 0, width, N, WIDTH, DIM))
    for step in range(PAGES * PARTS):
        page = tl.program_id(0) * PAGES + step // PARTS
        if page < num_pages:
            row = (step % PARTS) * ROWS
            block = page.to(tl.int64) * heads + head
            rows = _load_codes(codes + block * size * N, row, size, N, ROWS, DIM)
            best = tl.full([ROWS], LOWEST, tl.int32)
            for chunk in tl.static_range(CHUNKS):
                if chunk > 0:
                    query = tl.trans(_load_codes(queries, chunk * WIDTH, width, N, WIDTH, DIM))
                q = chunk * WIDTH + tl.arange(0, WIDTH)
                at = starts + (head.to(tl.int64) * num_pages + page) * width + q
                start = tl.load(at, mask=q < width, other=-1073741824)
                sums = tl.dot(rows, query, out_dtype=tl.int32) + start[None, :]
                best = tl.maximum(best, tl.max(sums, 1))
            if CHUNKS > 1:
                query = tl.trans(_load_codes(queries, 0, width, N, WIDTH, DIM))
            score = best.to(tl.float32) * (of_head * tl.load(page_scales + 2 * block))
            bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
            key = tl.where(score != score, LOWEST, bits ^ ((bits >> 31) & 0x7FFFFFFF))
            within = row + tl.arange(0, ROWS)
            to = keys + head.to(tl.int64) * stride + first_key + page * size + within
            tl.store(to, key, mask=within < size)


def score_codes(
    codes: torch.Tensor,
    mean_codes: torch.Tensor,
    page_scales: torch.Tensor,
    query_codes: torch.Tensor,
    lead: torch.Tensor,
    reach: torch.Tensor,
    keys: torch.Tensor,
    start: int,
) -> None:
    """See `herald_kernels.score_codes`."""
    pages, heads, size, n = codes.shape
    width = query_codes.shape[1]
    dim = max(n, 32)
    block = min(MAX_WIDTH, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, block)
    rows = max(16, min(MAX_ROWS, triton.next_power_of_2(size)))
    starts = torch.empty(heads, pages, width, dtype=torch.int32, device=codes.device)
    _starts_kernel[(triton.cdiv(pages, START_PAGES), heads, chunks)](
        mean_codes, page_scales, query_codes, lead, reach, starts, pages, heads, width, n,
        PAGES=START_PAGES, WIDTH=block, DIM=dim, num_warps=4,
    )  # fmt: skip
    _keys_kernel[(triton.cdiv(pages, PAGES), heads)](
        codes, starts, page_scales, query_codes, reach, keys, pages, heads, width, n, size, keys.shape[1],
        start, PAGES=PAGES, ROWS=rows, PARTS=triton.cdiv(size, rows), WIDTH=block, CHUNKS=chunks, DIM=dim,
        num_warps=4,
    )  # fmt: skip

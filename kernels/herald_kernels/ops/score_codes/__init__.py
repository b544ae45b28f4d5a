"""Scores of the codes of a key index: the arithmetic of herald/select/scan.py on the device."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation


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
    """The largest score of every row over the queries of its KV head, as an order key.

    Scores follow the formulas for 8 and 4 bits of ``herald/select/scan.py``, rounding by rounding, so that
    they are those of the CPU's kernels. An order key is an int32 that compares like the float32 it stands for
    (-0 as +0, NaN below all). Which pages are scored is read on the device, so that one captured launch
    serves every span.

    Args:
        codes: uint8 [P, H, S, n] or [P, H, S, n / 2], P pages of S rows with 8 or 4 bits a dimension; n a
            power of two.
        row_scales: float32 [N, H, S] with 4 bits, None with 8.
        mean_codes: int8 [N, H, 2, n], high and low level of each page's mean.
        page_scales: float32 [N, H, 2], the scale of the page's codes (8 bits) and of its mean.
        query_codes: int8 [H, W, n], W a multiple of 16.
        lead: float32 [H, W], least_lse - lse; -inf for a query that does not count.
        reach: float32 [H], query_scale times the softmax scale.
        span: int32 [4] on the device: first page of the request, how many, how far apart the keys of two
            heads are, and what is added to the table's pages. It is the caller's that all of it fits.
        starts: int32 or float32 [H, C, W], scratch; float32 with 4 bits. C is the most pages of a span.
        keys: int32 [K], of which those of the pages' rows are written: a head's page p of the request at
            ``head * span[2] + p * S``.
        table: int32 [C], where the pages of the request lie: page i has its codes, means and scales at
            ``span[3] + table[i]`` (P = N). None: the codes of the span's pages stand at ``codes[0]`` and on,
            means and scales of all the request's pages (N of them) in order.

    All contiguous, on one device.

    Raises:
        ValueError: shapes do not fit.
    """
    pages, heads, size, _ = codes.shape
    width, n = query_codes.shape[1:]
    total = pages if table is not None else mean_codes.shape[0]
    most = starts.shape[1]
    expected = {
        "codes": (codes, (pages, heads, size, n if row_scales is None else n // 2)),
        "mean_codes": (mean_codes, (total, heads, 2, n)),
        "page_scales": (page_scales, (total, heads, 2)),
        "query_codes": (query_codes, (heads, width, n)),
        "lead": (lead, (heads, width)),
        "reach": (reach, (heads,)),
        "span": (span, (4,)),
        "starts": (starts, (heads, most, width)),
        "keys": (keys, (keys.numel(),)),
    }
    if table is not None:
        expected["table"] = (table, (most,))
    elif most > pages:
        raise ValueError(f"starts has room for {most} pages; use {pages} at most, as codes have")
    if row_scales is not None:
        expected["row_scales"] = (row_scales, (total, heads, size))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; use {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if width == 0 or width % 16 or n & (n - 1):
        raise ValueError(f"width {width} must be a multiple of 16 and n={n} a power of two")
    kind = torch.int32 if row_scales is None else torch.float32
    if starts.dtype != kind:
        raise ValueError(f"starts has dtype {starts.dtype}; use {kind}")
    if most:
        implementation("score_codes", codes.device.type)(
            *(codes, row_scales, mean_codes, page_scales, query_codes, lead, reach, span, starts, keys, table)
        )

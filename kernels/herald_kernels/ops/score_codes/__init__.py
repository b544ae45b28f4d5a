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
    keys: torch.Tensor,
    start: int,
) -> None:
    """The largest score of every row over the queries of its KV head, as an order key.

    Scores follow the formulas for 8 and 4 bits of ``herald/select/scan.py``, rounding by rounding, so that
    they are those of the CPU's kernels. An order key is an int32 that compares like the float32 it stands for
    (-0 as +0, NaN below all).

    Args:
        codes: uint8 [P, H, S, n] or [P, H, S, n / 2], P pages of S rows with 8 or 4 bits a dimension; n a
            power of two.
        row_scales: float32 [P, H, S] with 4 bits, None with 8.
        mean_codes: int8 [P, H, 2, n], high and low level of each page's mean.
        page_scales: float32 [P, H, 2], the scale of the page's codes (8 bits) and of its mean.
        query_codes: int8 [H, W, n], W a multiple of 16.
        lead: float32 [H, W], least_lse - lse; -inf for a query that does not count.
        reach: float32 [H], query_scale times the softmax scale.
        keys: int32 [H, at least start + P * S], of which ``[start, start + P * S)`` is written.
        start: where the first page's rows begin in ``keys``.

    All contiguous, on one device.

    Raises:
        ValueError: shapes do not fit.
    """
    pages, heads, size, _ = codes.shape
    width, n = query_codes.shape[1:]
    expected = {
        "codes": (codes, (pages, heads, size, n if row_scales is None else n // 2)),
        "mean_codes": (mean_codes, (pages, heads, 2, n)),
        "page_scales": (page_scales, (pages, heads, 2)),
        "query_codes": (query_codes, (heads, width, n)),
        "lead": (lead, (heads, width)),
        "reach": (reach, (heads,)),
        "keys": (keys, (heads, keys.shape[1])),
    }
    if row_scales is not None:
        expected["row_scales"] = (row_scales, (pages, heads, size))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; use {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if width == 0 or width % 16 or n & (n - 1):
        raise ValueError(f"width {width} must be a multiple of 16 and n={n} a power of two")
    if not 0 <= start <= keys.shape[1] - pages * size:
        raise ValueError(f"keys of shape {tuple(keys.shape)} cannot hold {pages * size} rows from {start} on")
    if pages:
        implementation("score_codes", codes.device.type)(
            codes, row_scales, mean_codes, page_scales, query_codes, lead, reach, keys, start
        )

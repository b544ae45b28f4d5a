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
) -> None:
    """The largest score of every row over the queries of its KV head, as an order key.

    Scores follow the formulas for 8 and 4 bits of ``herald/select/scan.py``, rounding by rounding, so that
    they are those of the CPU's kernels. An order key is an int32 that compares like the float32 it stands for
    (-0 as +0, NaN below all). Which pages are scored is read on the device, so that one captured launch
    serves every span.

    Args:
        codes: uint8 [P, H, S, n] or [P, H, S, n / 2], room for P pages of S rows with 8 or 4 bits a
            dimension; n a power of two. Its first pages are scored.
        row_scales: float32 [N, H, S] with 4 bits, None with 8; of all pages of a request, as the next two.
        mean_codes: int8 [N, H, 2, n], high and low level of each page's mean.
        page_scales: float32 [N, H, 2], the scale of the page's codes (8 bits) and of its mean.
        query_codes: int8 [H, W, n], W a multiple of 16.
        lead: float32 [H, W], least_lse - lse; -inf for a query that does not count.
        reach: float32 [H], query_scale times the softmax scale.
        span: int32 [3] on the device: ``codes[i]`` are those of page ``span[0] + i`` of the request for
            i < span[1], and a head's keys are span[2] apart. It is the caller's that span[1] <= P,
            span[0] + span[1] <= N, (span[0] + span[1]) * S <= span[2] and H * span[2] <= K.
        starts: int32 or float32 [H, P, W], scratch; float32 with 4 bits.
        keys: int32 [K], of which those of the pages' rows are written: a head's page p at
            ``head * span[2] + p * S``.

    All contiguous, on one device.

    Raises:
        ValueError: shapes do not fit.
    """
    pages, heads, size, _ = codes.shape
    width, n = query_codes.shape[1:]
    total = mean_codes.shape[0]
    expected = {
        "codes": (codes, (pages, heads, size, n if row_scales is None else n // 2)),
        "mean_codes": (mean_codes, (total, heads, 2, n)),
        "page_scales": (page_scales, (total, heads, 2)),
        "query_codes": (query_codes, (heads, width, n)),
        "lead": (lead, (heads, width)),
        "reach": (reach, (heads,)),
        "span": (span, (3,)),
        "starts": (starts, (heads, pages, width)),
        "keys": (keys, (keys.numel(),)),
    }
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
    if pages:
        implementation("score_codes", codes.device.type)(
            *(codes, row_scales, mean_codes, page_scales, query_codes, lead, reach, span, starts, keys)
        )

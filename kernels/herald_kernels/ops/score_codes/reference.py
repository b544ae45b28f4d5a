"""Torch reference of `score_codes`."""

from __future__ import annotations

import torch

FARTHEST_START = float(1 << 30)
LOWEST_KEY = -(1 << 31)
# Pages whose dots are alive at once.
CHUNK_PAGES = 64


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
    heads, size = codes.shape[1:3]
    begin, count, stride, base = span.tolist()
    by_head = keys[: heads * stride].view(heads, stride)
    # float32 holds every dot exactly: |sum| <= 127 * 127 * 1024 < 2 ** 24
    queries = query_codes.float().transpose(1, 2)
    for first in range(0, count, CHUNK_PAGES):
        last = min(first + CHUNK_PAGES, count)
        out = slice((begin + first) * size, (begin + last) * size)
        held = torch.arange(first, last, device=codes.device)
        pages = held + begin
        if table is not None:
            pages = held = table[pages].long() + base
        means = (mean_codes[pages].float() @ queries).double()
        dot = (128 * means[:, :, 0] + means[:, :, 1]).float()
        unit = (reach * page_scales[pages, :, 1]).unsqueeze(-1)
        shift = _fma(dot, unit, lead)
        rows = _unpack(codes[held], row_scales is None)
        dots = rows.float() @ queries
        if row_scales is None:
            unit = reach * page_scales[pages, :, 0]
            start = shift * (1 / unit).unsqueeze(-1)
            start = start.nan_to_num(nan=-FARTHEST_START, posinf=FARTHEST_START, neginf=-FARTHEST_START)
            start = start.clamp(-FARTHEST_START, FARTHEST_START).round().long()
            best = (dots.long() + start.unsqueeze(2)).amax(3)
            score = best.float() * unit.unsqueeze(-1)
        else:
            unit = reach.unsqueeze(-1) * row_scales[pages]
            scores = _fma(dots, unit.unsqueeze(-1), shift.unsqueeze(2))
            score = scores.nan_to_num(nan=float("-inf")).amax(3)
        found = _order_keys(score).transpose(0, 1).flatten(1)
        by_head[:, out] = found


def _unpack(codes: torch.Tensor, whole_bytes: bool) -> torch.Tensor:
    """int8 [..., n] of rows with 8 or 4 bits a dimension."""
    if whole_bytes:
        return codes.view(torch.int8)
    return torch.cat([codes & 15, codes >> 4], -1).to(torch.int8) - 8


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32, all but rounded once: in float64 the product is exact, the sum nearly."""
    return (a.double() * b.double() + c.double()).float()


def _order_keys(score: torch.Tensor) -> torch.Tensor:
    bits = torch.where(score == 0, 0.0, score).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(score.isnan(), LOWEST_KEY, ordered)

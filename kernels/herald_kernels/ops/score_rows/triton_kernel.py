# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `score_rows`: a tile of keys stays in registers while all queries pass it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def _score_kernel(
    q,
    lse,
    rows,
    out,
    num_rows,
    num_queries,
    scale_log2,
    q_stride_query,
    q_stride_head,
    rows_stride_head,
    rows_stride_row,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, D)
    inside = n < num_rows
    key_rows = rows + head * rows_stride_head + n * rows_stride_row
    keys = tl.load(key_rows[:, None] + col[None, :], mask=inside[:, None], other=0.0)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for first in range(0, num_queries * G, BLOCK_Q):
        m = first + tl.arange(0, BLOCK_Q)
        real = m < num_queries * G
        query_rows = q + (m // G).to(tl.int64) * q_stride_query + (head * G + m % G) * q_stride_head
        query = tl.load(query_rows[None, :] + col[:, None], mask=real[None, :], other=0.0)
        offset = tl.load(
            lse + (m // G).to(tl.int64) * (H * G) + head * G + m % G, mask=real, other=float("inf")
        )
        # Base 2 throughout; a query beyond the last has an infinite offset and a score of -inf.
        scores = (
            tl.dot(keys, query, input_precision="ieee") * scale_log2 - (offset * 1.4426950408889634)[None, :]
        )
        higher = tl.maximum(peak, tl.max(scores, 1))
        if SUM:
            total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        peak = higher
    if SUM:
        peak = peak + tl.log2(total)
    tl.store(out + head * num_rows + n, peak * 0.6931471805599453, mask=inside)


def score_rows(
    q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, operator: str
) -> torch.Tensor:
    """See `herald_kernels.score_rows`. ``head_dim`` must be a power of two, at least 16."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_rows, _ = rows.shape
    group = num_heads // num_kv_heads
    exact = q.dtype == torch.float32
    block_rows = 32 if exact else 64 if head_dim > 256 else 128
    out = torch.empty(num_kv_heads, num_rows, dtype=torch.float32, device=q.device)
    if num_rows:
        _score_kernel[(triton.cdiv(num_rows, block_rows), num_kv_heads)](
            q,
            lse.contiguous(),
            rows,
            out,
            num_rows,
            num_queries,
            scale * 1.4426950408889634,
            *q.stride()[:2],
            *rows.stride()[:2],
            G=group,
            H=num_kv_heads,
            D=head_dim,
            SUM=operator == "sum",
            BLOCK_ROWS=block_rows,
            BLOCK_Q=min(32 if exact else 64, max(16, triton.next_power_of_2(num_queries * group))),
            num_warps=4 if exact else 8,
            num_stages=1 if exact else 2,
        )
    return out

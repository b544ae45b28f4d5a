"""Exact scores of rows for selection."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def score_rows(
    q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, operator: str
) -> torch.Tensor:
    """Normalised attention that every row would receive, in one number a row and KV head (a logarithm).

    Args:
        q: [M, num_heads, head_dim], the scored queries, unit stride in the last dimension.
        lse: float32 [M, num_heads], their log-sum-exp (`resident_attention`).
        rows: [num_kv_heads, n, 2 * head_dim], unit stride in the last dimension; only K is read.
        scale: of the scores, as in attention.
        operator: ``"max"`` over queries and grouped heads of ``q.k * scale - lse``, or ``"sum"``: the
            logarithm of the sum of its exponential.

    Returns:
        float32 [num_kv_heads, n].

    Raises:
        ValueError: the operator is unknown, shapes, dtypes or strides do not fit, or there is no query.
    """
    if operator not in ("max", "sum"):
        raise ValueError(f"operator={operator!r} is unknown; use 'max' or 'sum'")
    if q.shape[1] % rows.shape[0] or rows.shape[2] != 2 * q.shape[2] or q.dtype != rows.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} does not match rows {tuple(rows.shape)} {rows.dtype}")
    if lse.shape != q.shape[:2] or not q.shape[0]:
        raise ValueError(f"lse {tuple(lse.shape)} must be {tuple(q.shape[:2])}, with at least one query")
    need_unit_stride(q=q, rows=rows)
    scores: torch.Tensor = implementation("score_rows", q.device.type)(q, lse, rows, scale, operator)
    return scores

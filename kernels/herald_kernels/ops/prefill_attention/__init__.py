"""Block-causal attention of a chunk of a prompt."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def prefill_attention(
    q: torch.Tensor, rows: torch.Tensor, q_start: int, block_length: int, scale: float, window: int = 0
) -> torch.Tensor:
    """Attention of consecutive positions to everything before the end of their own block, or to a window.

    The query at position p sees positions ``< min((p // block_length + 1) * block_length, n)``: a block
    length of 1 is causal attention, one of n or more is bidirectional. With a window it sees of those only
    positions ``>= p - window``.

    Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), with rows of K and V side by side.

    Args:
        q: [C, num_heads, head_dim], positions ``q_start`` to ``q_start + C``, unit stride in the last
            dimension.
        rows: [num_kv_heads, n, 2 * head_dim] with ``n >= q_start + C``, unit stride in the last dimension.
        q_start: position of the first query.
        block_length: positions of a block.
        scale: of the scores before the softmax, positive.
        window: positions before its own that a query sees; 0 for all of them.

    Returns:
        Like q.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or rows are missing.
    """
    num_kv_heads, num_rows, width = rows.shape
    if q.shape[1] % num_kv_heads or width != 2 * q.shape[2] or q.dtype != rows.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} does not match rows {tuple(rows.shape)} {rows.dtype}")
    if q_start < 0 or num_rows < q_start + q.shape[0] or block_length < 1:
        raise ValueError(
            f"queries {q_start}..{q_start + q.shape[0]} in blocks of {block_length} need at least "
            f"{q_start + q.shape[0]} rows; there are {num_rows}"
        )
    if window < 0:
        raise ValueError(f"window={window} must be 0 (none) or more")
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive")
    need_unit_stride(q=q, rows=rows)
    out: torch.Tensor = implementation("prefill_attention", q.device.type)(
        q, rows, q_start, block_length, scale, window
    )
    return out

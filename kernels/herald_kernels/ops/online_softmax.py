# mypy: disable-error-code="no-untyped-def"
"""The step that both attention kernels repeat: one tile of keys and values folded into a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(
    query, rows, row_valid, visible, peak, total, acc, scale_log2, D: tl.constexpr, MASKED: tl.constexpr
):
    """Fold a tile of rows into the online softmax of a tile of queries.

    Args:
        query: [BM, D].
        rows: int64 pointers [BN] to the first element of each row: K, then V.
        row_valid: bool [BN]; other rows are not read.
        visible: bool, broadcastable to [BM, BN]; ignored unless MASKED. Every query must have seen a visible
            row by the end of the first fold.
        peak, total, acc: float32 [BM], [BM], [BM, D]: maximum (in base 2), sum and weighted values so far.
        scale_log2: softmax scale times log2(e).
    """
    col = tl.arange(0, D)
    keys = tl.load(rows[None, :] + col[:, None], mask=row_valid[None, :], other=0.0)
    # float32 stays exact ("ieee") rather than tf32; for 16-bit inputs the option means nothing.
    scores = tl.dot(query, keys, input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    values = tl.load(rows[:, None] + (D + col)[None, :], mask=row_valid[:, None], other=0.0)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc

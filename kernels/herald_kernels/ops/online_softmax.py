# mypy: disable-error-code="no-untyped-def"
"""What both attention kernels repeat: tiles of keys and values, folded into a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(
    query,
    keys,
    values,
    visible,
    peak,
    total,
    acc,
    scale_log2,
    MASKED: tl.constexpr,
    EMPTY: tl.constexpr = False,
):
    """Fold a tile of rows into the online softmax of a tile of queries.

    Args:
        query: [BM, D].
        keys: [BN, D].
        values: [BN, D]; finite, also where nothing is visible.
        visible: bool, broadcastable to [BM, BN]; ignored unless MASKED. Unless EMPTY, every query must have
            seen a visible row by the end of the first fold.
        peak, total, acc: float32 [BM], [BM], [BM, D]: maximum (in base 2), sum and weighted values so far.
        scale_log2: softmax scale times log2(e), positive.
    """
    # float32 stays exact ("ieee") rather than tf32; for 16-bit inputs the option means nothing.
    scores = tl.dot(query, keys.T, input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    if EMPTY:
        # A finite maximum, so that a query which has seen nothing yet weighs all rows with 0.
        higher = tl.maximum(higher, -1e38)
    # One fused multiply-add a score.
    weights = tl.exp2(scores * scale_log2 - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def load_tile(rows, row_valid, D: tl.constexpr):
    """Keys and values, each [BN, D], of the rows that begin at the pointers ``rows``; 0 if not valid."""
    col = tl.arange(0, D)
    keys = tl.load(rows[:, None] + col[None, :], mask=row_valid[:, None], other=0.0)
    values = tl.load(rows[:, None] + (D + col)[None, :], mask=row_valid[:, None], other=0.0)
    return keys, values


@triton.jit
def load_full_tile(
    rows,
    descriptor,
    first_row,
    stride_row,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Keys and values, each [BLOCK_N, D], of consecutive rows that all exist.

    Args:
        rows: pointer to the first element of the first row.
        descriptor: of the tensor as a matrix of rows, or None unless DESCRIPTORS.
        first_row: number of the first row in the descriptor's matrix.
        stride_row: elements from row to row.
    """
    if DESCRIPTORS:
        keys = descriptor.load([first_row, 0])
        values = descriptor.load([first_row, D])
    else:
        n = tl.arange(0, BLOCK_N)
        col = tl.arange(0, D)
        pointers = rows + n[:, None] * stride_row + col[None, :]
        keys = tl.load(pointers)
        values = tl.load(pointers + D)
    return keys, values

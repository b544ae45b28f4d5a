# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `greedy_confidence`: one program a row, an online softmax in every vector element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_V = 4096


@triton.jit
def _greedy_confidence_kernel(logits, token, confidence, vocab_size, stride, BLOCK: tl.constexpr):
    LOWEST: tl.constexpr = -3.4028234663852886e38
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    # A finite start keeps exp(-inf - -inf) out of the sums. Elements are reduced once, after the loop.
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], 2147483647, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + offset
        value = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(
            tl.float32
        )
        wrong = (value != value) | (value == float("inf"))
        bad = bad | wrong.to(tl.int32)
        value = tl.where(wrong, float("-inf"), value)
        # An element's first id is at or above LOWEST, later ones must exceed its peak: the lowest id wins.
        best = tl.where((value > peak) | ((value == peak) & (best == 2147483647)), ids, best)
        higher = tl.maximum(peak, value)
        total = total * tl.exp(peak - higher) + tl.exp(value - higher)
        peak = higher
    top = tl.max(peak, 0)
    winner = tl.min(tl.where(peak == top, best, 2147483647), 0)
    total_sum = tl.sum(total * tl.exp(peak - top), 0)
    broken = (tl.max(bad, 0) > 0) | (winner == 2147483647)
    tl.store(token + row, tl.where(winner == 2147483647, 0, winner).to(tl.int64))
    tl.store(confidence + row, tl.where(broken, float("nan"), 1.0 / total_sum))


def greedy_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.greedy_confidence`."""
    num_rows, vocab_size = logits.shape
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    confidence = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _greedy_confidence_kernel[(num_rows,)](
            logits,
            token,
            confidence,
            vocab_size,
            logits.stride(0),
            BLOCK=min(BLOCK_V, triton.next_power_of_2(vocab_size)),
            num_warps=8,
        )
    return token, confidence

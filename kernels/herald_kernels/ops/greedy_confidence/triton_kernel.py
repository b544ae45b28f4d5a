# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `greedy_confidence`: programs take parts of a row's vocabulary, another joins the parts.

The parts depend on the size of the vocabulary alone, so that a row's bits do not depend on its neighbours.
Even one block's rows fill a large GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits of a program, all of them in registers at once: each is read once and exponentiated once.
PART = 8192
NO_ID = tl.constexpr(2147483647)


@triton.jit
def _part_kernel(logits, part_peak, part_total, vocab_size, num_parts, stride, BLOCK: tl.constexpr):
    """Largest value of a part, and its sum of exponentials, NaN where a value is NaN or +inf.

    Where the largest value stands is left to `_join_kernel`, which looks for it in one part of each row:
    every operation here is made for every logit.
    """
    LOWEST: tl.constexpr = -3.4028234663852886e38
    LOG2_E: tl.constexpr = 1.4426950408889634
    target = tl.program_id(0)
    row = (target // num_parts).to(tl.int64)
    ids = (target % num_parts) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    peak = tl.max(value, 0)
    # A finite offset keeps exp(-inf - -inf) out of the sum; the largest value itself counts exactly 1.
    total = tl.sum(tl.exp2((value - tl.maximum(peak, LOWEST)) * LOG2_E), 0)
    tl.store(part_peak + target, peak)
    tl.store(part_total + target, total)


@triton.jit
def _join_kernel(
    logits, part_peak, part_total, token, confidence, vocab_size, num_parts, stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    source = row * num_parts + part
    inside = part < num_parts
    peak = tl.load(part_peak + source, mask=inside, other=float("-inf"))
    total = tl.load(part_total + source, mask=inside, other=0.0)
    top = tl.max(peak, 0)
    # Nothing but -inf: the differences below are NaN, and so is the sum. A part with a NaN brings its own.
    share = 1.0 / tl.sum(tl.where(inside, total * tl.exp(peak - top), 0.0), 0)
    first = tl.min(tl.where(peak == top, part, PARTS), 0) % num_parts * BLOCK
    ids = first + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    winner = tl.min(tl.where((value == top) & (ids < vocab_size), ids, NO_ID), 0)
    tl.store(token + row, tl.where(winner == NO_ID, 0, winner).to(tl.int64))
    tl.store(confidence + row, share)


def greedy_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.greedy_confidence`."""
    num_rows, vocab_size = logits.shape
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    confidence = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        block = min(PART, triton.next_power_of_2(vocab_size))
        num_parts = triton.cdiv(vocab_size, block)
        peak = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
        total = torch.empty_like(peak)
        _part_kernel[(num_rows * num_parts,)](
            logits, peak, total, vocab_size, num_parts, logits.stride(0), BLOCK=block, num_warps=4
        )
        _join_kernel[(num_rows,)](
            logits,
            peak,
            total,
            token,
            confidence,
            vocab_size,
            num_parts,
            logits.stride(0),
            PARTS=triton.next_power_of_2(num_parts),
            BLOCK=block,
            num_warps=4,
        )
    return token, confidence

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
def _part_kernel(logits, part_peak, part_total, part_id, vocab_size, num_parts, stride, BLOCK: tl.constexpr):
    LOWEST: tl.constexpr = -3.4028234663852886e38
    target = tl.program_id(0)
    row = (target // num_parts).to(tl.int64)
    ids = (target % num_parts) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    wrong = (value != value) | (value == float("inf"))
    bad = tl.max(wrong.to(tl.int32), 0)
    value = tl.where(wrong, float("-inf"), value)
    peak = tl.max(value, 0)
    # A finite offset keeps exp(-inf - -inf) out of the sum.
    total = tl.sum(tl.exp(value - tl.maximum(peak, LOWEST)), 0)
    winner = tl.min(tl.where((value == peak) & (value > float("-inf")), ids, NO_ID), 0)
    tl.store(part_peak + target, peak)
    tl.store(part_total + target, tl.where(bad > 0, float("nan"), total))
    tl.store(part_id + target, winner)


@triton.jit
def _join_kernel(part_peak, part_total, part_id, token, confidence, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    source = row * num_parts + part
    inside = part < num_parts
    peak = tl.load(part_peak + source, mask=inside, other=float("-inf"))
    total = tl.load(part_total + source, mask=inside, other=0.0)
    ids = tl.load(part_id + source, mask=inside, other=NO_ID)
    top = tl.max(peak, 0)
    winner = tl.min(tl.where(peak == top, ids, NO_ID), 0)
    # Nothing but -inf: the differences below are NaN, and so is the sum. A part with a NaN brings its own.
    share = 1.0 / tl.sum(tl.where(inside, total * tl.exp(peak - top), 0.0), 0)
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
        total, ids = torch.empty_like(peak), torch.empty_like(peak, dtype=torch.int32)
        _part_kernel[(num_rows * num_parts,)](
            logits, peak, total, ids, vocab_size, num_parts, logits.stride(0), BLOCK=block, num_warps=4
        )
        _join_kernel[(num_rows,)](
            peak,
            total,
            ids,
            token,
            confidence,
            num_parts,
            BLOCK=triton.next_power_of_2(num_parts),
            num_warps=1,
        )
    return token, confidence

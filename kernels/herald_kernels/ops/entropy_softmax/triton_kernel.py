# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `entropy_softmax`: parts of a row's vocabulary, the row's sums, then its probabilities.

The parts depend on the size of the vocabulary alone, as in `greedy_confidence`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits of a program, all of them in registers at once.
PART = 8192
NO_ID = tl.constexpr(2147483647)


@triton.jit
def _part_kernel(
    logits,
    temperature,
    part_peak,
    part_total,
    part_weighted,
    part_id,
    vocab_size,
    num_parts,
    stride,
    BLOCK: tl.constexpr,
):
    LOWEST: tl.constexpr = -3.4028234663852886e38
    target = tl.program_id(0)
    row = (target // num_parts).to(tl.int64)
    ids = (target % num_parts) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    wrong = (value != value) | (value == float("inf"))
    bad = tl.max(wrong.to(tl.int32), 0)
    value = tl.where(wrong, float("-inf"), value)
    top = tl.max(value, 0)
    winner = tl.min(tl.where((value == top) & (value > float("-inf")), ids, NO_ID), 0)
    value = value / tl.load(temperature + row)
    peak = tl.max(value, 0)
    # A finite offset keeps exp(-inf - -inf) out of the sums.
    shifted = value - tl.maximum(peak, LOWEST)
    grown = tl.exp(shifted)
    total = tl.sum(grown, 0)
    weighted = tl.sum(tl.where(grown > 0, grown * shifted, 0.0), 0)
    tl.store(part_peak + target, peak)
    tl.store(part_total + target, tl.where(bad > 0, float("nan"), total))
    tl.store(part_weighted + target, weighted)
    tl.store(part_id + target, winner)


@triton.jit
def _join_kernel(
    part_peak, part_total, part_weighted, part_id, token, entropy, norm, num_parts, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    source = row * num_parts + part
    inside = part < num_parts
    peak = tl.load(part_peak + source, mask=inside, other=float("-inf"))
    total = tl.load(part_total + source, mask=inside, other=0.0)
    weighted = tl.load(part_weighted + source, mask=inside, other=0.0)
    ids = tl.load(part_id + source, mask=inside, other=NO_ID)
    top = tl.max(peak, 0)
    winner = tl.min(tl.where(peak == top, ids, NO_ID), 0)
    # Nothing but -inf: the differences below are NaN, and so is the entropy, as with a part that has a NaN.
    lower = peak - top
    share = tl.exp(lower)
    sum_all = tl.sum(tl.where(inside, total * share, 0.0), 0)
    mean = tl.sum(tl.where(inside & (share > 0), (weighted + total * lower) * share, 0.0), 0) / sum_all
    tl.store(token + row, tl.where(winner == NO_ID, 0, winner).to(tl.int64))
    tl.store(entropy + row, tl.log(sum_all) - mean)
    tl.store(norm + row, top + tl.log(sum_all))


@triton.jit
def _share_kernel(
    logits, temperature, norm, probabilities, vocab_size, num_parts, stride, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // num_parts).to(tl.int64)
    ids = (tl.program_id(0) % num_parts) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.exp(value / tl.load(temperature + row) - tl.load(norm + row))
    tl.store(probabilities + row * vocab_size + ids, share.to(probabilities.dtype.element_ty), mask=inside)


def entropy_softmax(
    logits: torch.Tensor, temperature: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `herald_kernels.entropy_softmax`."""
    num_rows, vocab_size = logits.shape
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    entropy = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    probabilities = torch.empty(num_rows, vocab_size, dtype=dtype, device=logits.device)
    if num_rows:
        block = min(PART, triton.next_power_of_2(vocab_size))
        num_parts = triton.cdiv(vocab_size, block)
        peak = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
        total, weighted = torch.empty_like(peak), torch.empty_like(peak)
        ids = torch.empty_like(peak, dtype=torch.int32)
        norm = torch.empty_like(entropy)
        temperature = temperature.contiguous()
        sizes = (vocab_size, num_parts, logits.stride(0))
        programs = (num_rows * num_parts,)
        _part_kernel[programs](
            logits, temperature, peak, total, weighted, ids, *sizes, BLOCK=block, num_warps=4
        )
        joined = triton.next_power_of_2(num_parts)
        _join_kernel[(num_rows,)](
            peak, total, weighted, ids, token, entropy, norm, num_parts, BLOCK=joined, num_warps=1
        )
        _share_kernel[programs](logits, temperature, norm, probabilities, *sizes, BLOCK=block, num_warps=4)
    return token, entropy, probabilities

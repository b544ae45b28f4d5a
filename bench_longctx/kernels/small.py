"""The smaller operations: element-wise fusions beside plain torch, and what a graph's step needs besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from bench_longctx.kernels.attention import SDAR_8B, TINY, assert_close
from bench_longctx.kernels.timing import Figure, Limits, figure, num_buffers, seconds_each
from herald_kernels import commit, copy_rows, greedy_confidence, open_blocks, qk_norm_rope, rms_norm, silu_mul
from herald_kernels.ops.greedy_confidence import reference as greedy_reference
from herald_kernels.ops.qk_norm_rope import reference as rope_reference

# Hidden size, MLP size, vocabulary; tokens of a call.
SIZES, TINY_SIZES = (4096, 12_288, 151_936), (64, 192, 9000)
TOKENS, TINY_TOKENS = (32, 64, 256, 640, 1280, 4096), (8, 16)


def check(device: str) -> None:
    """The operations against plain torch on small shapes.

    Raises:
        AssertionError: they differ by more than their dtype explains.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bound = 8e-3 if dtype == torch.bfloat16 else 2e-6
    hidden = torch.randn(5, 256, device=device, dtype=dtype)
    weight = torch.randn(256, device=device, dtype=dtype)
    assert_close(rms_norm(hidden, weight, 1e-6), F.rms_norm(hidden, (256,), weight, 1e-6), bound, "rms_norm")
    gate, up = hidden.chunk(2, -1)
    assert_close(silu_mul(hidden), F.silu(gate) * up, bound, "silu_mul")
    logits = torch.randn(4, 20_001, device=device, dtype=dtype)
    tokens, confidence = greedy_confidence(logits)
    expected_tokens, expected = greedy_reference.greedy_confidence(logits)
    assert torch.equal(tokens, expected_tokens), "greedy_confidence: other tokens"
    assert_close(confidence, expected, 1e-4, "greedy_confidence")


def repeat(
    make: Callable[[], tuple[Any, ...]], call: Callable[..., object], bytes_each: int, device: str
) -> float:
    """Median seconds of ``call`` on inputs that are not in the L2 cache."""
    count = num_buffers(bytes_each) if device == "cuda" else 1
    inputs = [make() for _ in range(count)]
    return seconds_each([partial(call, *given) for given in inputs * max(1, 8 // count)])


def fusion_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Norm, gate and rotation beside the torch they replace."""
    for tokens in TINY_TOKENS if tiny else TOKENS:
        for name, make, call, num_bytes in fusions(device, tiny, tokens):
            seconds = repeat(make, call, num_bytes, device)
            yield figure("fusion", name, f"{tokens} tokens", seconds, num_bytes, 0, limits)


def fusions(
    device: str, tiny: bool, tokens: int
) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]], Callable[..., object], int]]:
    """Name, maker of inputs, call on them and bytes to move, for each operation and the torch it replaces."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = TINY if tiny else SDAR_8B
    hidden_size, mlp, _ = TINY_SIZES if tiny else SIZES
    width = (heads.query + 2 * heads.kv) * heads.dim
    new = partial(torch.randn, device=device, dtype=dtype)
    weight, head_weight = new(hidden_size), new(heads.dim)
    angle = torch.randn(tokens, heads.dim // 2, device=device)

    def hidden() -> tuple[torch.Tensor, ...]:
        return (new(tokens, hidden_size),)

    def gate_up() -> tuple[torch.Tensor, ...]:
        return (new(tokens, 2 * mlp),)

    def projected() -> tuple[torch.Tensor, ...]:
        rows = new(tokens // heads.block, heads.kv, heads.block, 2 * heads.dim)
        return new(tokens, width), new(tokens, heads.query, heads.dim), rows

    def norm_torch(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (hidden_size,), weight, 1e-6)

    def gate_torch(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def rotate(op: Callable[..., None], qkv: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> None:
        op(qkv, head_weight, head_weight, angle, angle, q, rows, heads.query, heads.kv, 1e-6)

    norm_bytes = 2 * tokens * hidden_size * dtype.itemsize
    gate_bytes, rope_bytes = 3 * tokens * mlp * dtype.itemsize, 2 * tokens * width * dtype.itemsize
    yield "rms_norm", hidden, lambda x: rms_norm(x, weight, 1e-6), norm_bytes
    yield "rms_norm, torch", hidden, norm_torch, norm_bytes
    yield "silu_mul", gate_up, silu_mul, gate_bytes
    yield "silu_mul, torch", gate_up, gate_torch, gate_bytes
    yield "qk_norm_rope", projected, partial(rotate, qk_norm_rope), rope_bytes
    yield "qk_norm_rope, torch", projected, partial(rotate, rope_reference.qk_norm_rope), rope_bytes


def small_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Confidence, commit, opening of blocks, copies of rows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    vocabulary = (TINY_SIZES if tiny else SIZES)[2]
    heads = TINY if tiny else SDAR_8B
    for tokens in TINY_TOKENS if tiny else (32, 64, 256, 640):
        num_bytes = tokens * vocabulary * dtype.itemsize
        logits = partial(torch.randn, tokens, vocabulary, device=device, dtype=dtype)
        seconds = repeat(lambda make=logits: (make(),), greedy_confidence, num_bytes, device)
        yield figure("small", "greedy_confidence", f"{tokens} tokens", seconds, num_bytes, 0, limits)
    for slots in (4,) if tiny else (1, 20, 64):
        seconds = seconds_each([block_step(device, slots, heads.block)] * 20)
        num_bytes = 8 * slots * heads.block * 8
        yield figure("small", "open_blocks + commit", f"{slots} slots", seconds, num_bytes, 0, limits)
    for num_rows in (100,) if tiny else (5000, 150_000, 600_000):
        arena = torch.randn(4 * num_rows, 2 * heads.dim, device=device).to(dtype)
        staged = torch.randn(num_rows, 2 * heads.dim, device=device).to(dtype)
        order = torch.randperm(4 * num_rows, device=device)[:num_rows].sort().values
        seconds = seconds_each([partial(copy_rows, arena, order, staged, None)] * 8)
        yield figure("small", "copy_rows", f"{num_rows} rows", seconds, 2 * staged.nbytes, 0, limits)


def block_step(device: str, slots: int, block: int) -> Callable[[], object]:
    """What a step does to the tables of ``slots`` blocks, each of which opens and commits one token."""
    tables = torch.zeros(4, slots + 1, block, dtype=torch.int64, device=device)
    masked = torch.ones(slots + 1, block, dtype=torch.bool, device=device)
    ids = torch.arange(slots, device=device)
    ones, confidence = torch.ones_like(ids), torch.rand(slots, block, device=device)
    threshold = torch.full((slots + 1,), 2.0, device=device)
    tokens, draft, closed, best = tables[0], tables[1], tables[2], tables[3, :slots]

    def step() -> object:
        open_blocks(tokens, masked, draft, closed, ids, ones, 7)
        return commit(tokens, masked, draft, ids, best, best, confidence, ones, threshold)

    return step

# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `expert_mlp`: one grouped product for gate and up, again for down, then the weighted sum.

Every launch has the size of the worst choice of experts; programs beyond the tiles there are end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from herald_kernels.ops import tiles
from herald_kernels.ops.expert_mlp.buckets import Buckets, make_buckets
from herald_kernels.ops.gates import open_gate


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x,
    weight,
    out,
    pairs,
    tile_expert,
    num_tiles,
    num_pairs,
    x_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Rows of one tile times some columns of its expert's weights.

    ``GATED``: ``x`` are hidden states by token, ``weight`` is [E, 2 * N, D], and the gated values go to
    ``out`` row by row of the tiles. Else ``x`` are those rows, ``weight`` is [E, N, D], and the products go
    to ``out`` pair by pair. ``DESCRIPTOR``: ``weight`` is one, of a matrix of all experts' rows.
    """
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + row)
    real = pair < num_pairs
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    inside = n < N
    source = pair // TOP_K if GATED else row
    x_at = x + source.to(tl.int64)[:, None] * x_stride + k[None, :]
    PARTS: tl.constexpr = 2 if GATED else 1
    first_row = (expert * (N * PARTS)).to(tl.int32) + tl.program_id(0) * COLS
    if not DESCRIPTOR:
        w_at = weight + expert * (D * N * PARTS) + n[None, :] * D + k[:, None]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    up_acc = acc
    for first in range(0, D, DEPTH):
        if D % DEPTH == 0:
            x_mask, w_mask = real[:, None], inside[None, :]
        else:
            x_mask, w_mask = (
                real[:, None] & (first + k < D)[None, :],
                inside[None, :] & (first + k < D)[:, None],
            )
        part = tl.load(x_at + first, mask=x_mask, other=0.0)
        if DESCRIPTOR:
            w = weight.load([first_row, first]).T
        else:
            w = tl.load(w_at + first, mask=w_mask, other=0.0)
        acc = tl.dot(part, w, acc, input_precision="ieee")
        if GATED:
            if DESCRIPTOR:
                up = weight.load([first_row + N, first]).T
            else:
                up = tl.load(w_at + N * D + first, mask=w_mask, other=0.0)
            up_acc = tl.dot(part, up, up_acc, input_precision="ieee")
    kind = out.dtype.element_ty
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        opened = open_gate(gate, GELU)
        opened = opened.to(kind).to(tl.float32)
        value = (opened * up_acc.to(kind).to(tl.float32)).to(kind)
        tl.store(out + row.to(tl.int64)[:, None] * N + n[None, :], value, mask=inside[None, :])
    else:
        target = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(target, acc.to(kind), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def _combine_kernel(
    results, weights, out, num_parts, out_stride, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = (tl.program_id(0) // num_parts).to(tl.int64)
    col = (tl.program_id(0) % num_parts) * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        value = tl.load(results + pair * D + col, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * value
    target = out + token * out_stride + col
    before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (before + total).to(out.dtype.element_ty), mask=inside)


def _grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    buckets: Buckets,
    num_pairs: int,
    top_k: int,
    gated: bool,
    gelu: bool,
    tile: tiles.ProductTiles,
) -> None:
    """Launch `_grouped_kernel` for all columns and as many tiles as there can be."""
    columns, depth = out.shape[-1], x.shape[-1]
    cols = min(tile.columns, max(16, triton.next_power_of_2(columns)))
    steps = min(tile.depth, max(16, triton.next_power_of_2(depth)))
    described = None
    if tile.descriptors and columns % cols == 0 and depth % steps == 0:
        described = tiles.matrix_descriptor(weight.flatten(0, 1), cols, steps)
    _grouped_kernel[(triton.cdiv(columns, cols), buckets.max_tiles)](
        x,
        weight if described is None else described,
        out,
        buckets.pairs,
        buckets.expert,
        buckets.num_tiles,
        num_pairs,
        x.stride(0),
        D=depth,
        N=columns,
        TOP_K=top_k,
        GATED=gated,
        GELU=gelu,
        ROWS=tile.rows,
        COLS=cols,
        DEPTH=steps,
        DESCRIPTOR=described is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def expert_mlp(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    activation: str = "silu",
) -> None:
    """See `herald_kernels.expert_mlp`."""
    num_tokens, top_k = ids.shape
    gelu = activation == "gelu_tanh"
    num_experts, width, size = down.shape
    num_pairs = num_tokens * top_k
    gate_tile, down_tile = tiles.expert_tiles(
        num_pairs / num_experts, hidden.dtype, tiles.shared_bytes(hidden.device)
    )
    buckets = make_buckets(ids, num_experts, gate_tile.rows)
    gated = torch.empty(buckets.pairs.numel(), size, dtype=hidden.dtype, device=hidden.device)
    results = torch.empty(num_pairs, width, dtype=hidden.dtype, device=hidden.device)
    _grouped(hidden, gate_up, gated, buckets, num_pairs, top_k, True, gelu, gate_tile)
    _grouped(gated, down, results, buckets, num_pairs, top_k, False, gelu, down_tile)
    block = min(tiles.COMBINE.size, triton.next_power_of_2(width))
    num_parts = triton.cdiv(width, block)
    _combine_kernel[(num_tokens * num_parts,)](
        results,
        weights,
        out,
        num_parts,
        out.stride(0),
        D=width,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=tiles.COMBINE.num_warps,
    )

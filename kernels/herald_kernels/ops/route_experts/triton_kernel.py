# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `route_experts`: the router's product, then the choice of a few tokens a program.

The product is a kernel of its own: one program that needs all experts' weights for its few tokens reads them
at the rate of one multiprocessor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from herald_kernels.ops import tiles


@triton.jit
def _limit_to_groups(choice, BLOCK: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr):
    """``choice`` [BLOCK, E] with -inf outside the best groups of each token."""
    SIZE: tl.constexpr = E // GROUPS
    groups = tl.reshape(choice, [BLOCK, GROUPS, SIZE])
    place = tl.arange(0, SIZE)[None, None, :]
    first = tl.max(groups, 2)
    at = tl.min(tl.where(groups == first[:, :, None], place, SIZE), 2)
    second = tl.max(tl.where(place == at[:, :, None], float("-inf"), groups), 2)
    worth = first + second
    group = tl.arange(0, GROUPS)
    mine, other = worth[:, :, None], worth[:, None, :]
    ahead = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    rank = tl.sum(ahead.to(tl.int32), 2)
    kept = tl.where((rank < TOP)[:, :, None], groups, float("-inf"))
    return tl.reshape(kept, [BLOCK, E])


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    hidden,
    weight,
    logits,
    num_tokens,
    hidden_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Router logits of a tile. ``TURNED``: weights are the left operand, which may come from registers: where
    float32 weights are split, their halves need not go back to shared memory."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * COLS + tl.arange(0, COLS)
    valid, real = token < num_tokens, expert < E
    acc = tl.zeros([COLS, ROWS] if TURNED else [ROWS, COLS], tl.float32)
    for first in range(0, D, DEPTH):
        col = first + tl.arange(0, DEPTH)
        if D % DEPTH == 0:
            x_mask, w_mask = valid[:, None], real[:, None]
        else:
            x_mask, w_mask = valid[:, None] & (col < D)[None, :], real[:, None] & (col < D)[None, :]
        x = tl.load(hidden + token[:, None] * hidden_stride + col[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight + expert[:, None] * D + col[None, :], mask=w_mask, other=0.0)
        if SPLIT:
            # A float32 weight is the sum of two 16-bit ones to 2^-17, whose products with 16-bit values are
            # exact.
            high = w.to(x.dtype)
            low = (w - high.to(tl.float32)).to(x.dtype)
            acc = _product(x, low, acc, TURNED)
            acc = _product(x, high, acc, TURNED)
        else:
            acc = _product(x, w, acc, TURNED)
    if TURNED:
        acc = acc.T
    tl.store(logits + token[:, None] * E + expert[None, :], acc, mask=valid[:, None] & real[None, :])


@triton.jit
def _product(x, w, acc, TURNED: tl.constexpr):
    if TURNED:
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    logits,
    bias,
    expert_scale,
    ids,
    weights,
    num_tokens,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERT_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    LOWEST: tl.constexpr = -1e38
    TAKEN: tl.constexpr = -9223372036854775808
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, BLOCK_E)
    valid, real = token < num_tokens, expert < E
    logits = tl.load(
        logits + token[:, None] * E + expert[None, :], mask=valid[:, None] & real[None, :], other=0.0
    )

    if SOFTMAX:
        logits = tl.where(real[None, :], logits, float("-inf"))
        grown = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = grown / tl.sum(grown, 1)[:, None]
    else:
        score = 1.0 / (1.0 + tl.exp(-logits))
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0)[None, :]
    choice = tl.where(choice == choice, choice, LOWEST)
    choice = tl.where(real[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _limit_to_groups(choice, BLOCK, BLOCK_E, GROUPS, TOP_GROUPS)

    # Value and id in one integer: what is larger is better, and one reduction finds it. (A float's bits are
    # in the order of its value once those of negative values are turned.)
    bits = choice.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = ordered * 4294967296 + (BLOCK_E - 1 - expert).to(tl.int64)[None, :]
    rank = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK, BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 1)[:, None]
        chosen = tl.where(rank == k, (BLOCK_E - 1 - (best & 0xFFFFFFFF)).to(tl.int32), chosen)
        key = tl.where(key == best, TAKEN, key)
    shares = tl.where(rank < TOP_K, tl.gather(score, chosen, 1), 0.0)
    if NORMALISE:
        shares = shares / (tl.sum(shares, 1) + 1e-20)[:, None]
    if EXPERT_SCALE:
        shares *= tl.load(expert_scale + chosen, mask=rank < TOP_K, other=0.0)
    target = token[:, None] * TOP_K + rank
    written = valid[:, None] & (rank < TOP_K)
    tl.store(ids + target, chosen, mask=written)
    tl.store(weights + target, shares * scale, mask=written)


def route_experts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.route_experts`. Experts in groups must be powers of two, and the groups too."""
    num_tokens, width = hidden.shape
    num_experts = weight.shape[0]
    block_e = max(16, triton.next_power_of_2(num_experts))
    if num_groups > 1 and (num_experts != block_e or num_groups & (num_groups - 1)):
        raise ValueError(
            f"{num_experts} experts in {num_groups} groups: both must be powers of two, 16 or more"
        )
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=hidden.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=hidden.device)
    if not num_tokens:
        return ids, weights
    split = weight.dtype != hidden.dtype
    tile = tiles.router_tiles(num_tokens, hidden.dtype)
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=hidden.device)
    columns = min(tile.columns, block_e)
    _logits_kernel[(triton.cdiv(num_tokens, tile.rows), triton.cdiv(num_experts, columns))](
        hidden,
        weight,
        logits,
        num_tokens,
        hidden.stride(0),
        D=width,
        E=num_experts,
        SPLIT=split,
        ROWS=tile.rows,
        COLS=columns,
        DEPTH=tile.depth,
        TURNED=columns >= 64,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    block = tiles.CHOOSE.size
    _choose_kernel[(triton.cdiv(num_tokens, block),)](
        logits,
        weight if bias is None else bias,
        weight if expert_scale is None else expert_scale,
        ids,
        weights,
        num_tokens,
        scale,
        E=num_experts,
        TOP_K=top_k,
        SOFTMAX=score == "softmax",
        BIAS=bias is not None,
        EXPERT_SCALE=expert_scale is not None,
        GROUPS=num_groups,
        TOP_GROUPS=min(top_groups, num_groups),
        NORMALISE=normalise,
        BLOCK=block,
        BLOCK_E=block_e,
        BLOCK_K=max(2, triton.next_power_of_2(top_k)),
        num_warps=tiles.CHOOSE.num_warps,
    )
    return ids, weights

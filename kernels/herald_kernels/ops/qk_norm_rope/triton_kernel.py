# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `qk_norm_rope`: a program takes some heads of a few tokens and reads phases once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from herald_kernels.ops.tiles import rotate_strip


@triton.jit
def _scale(raw, inverse_rms, weight, NORM: tl.constexpr):
    """Values in float32, as the norm and its weights (at the pointers ``weight``) leave them rounded."""
    if NORM:
        value = (raw.to(tl.float32) * inverse_rms[:, None]).to(raw.dtype).to(tl.float32)
        scaled = value * tl.load(weight).to(tl.float32)[None, :]
        return scaled.to(raw.dtype).to(tl.float32)
    else:
        return raw.to(tl.float32)


@triton.jit
def _rotate_halves(
    source,
    target,
    weight,
    c,
    s,
    valid,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
):
    """One head of each token, from where ``source`` points to where ``target`` does; its last REST stay.

    ``c`` and ``s`` are the phases, [tokens, HALF]; HALF and REST (unless it is 0) are powers of two.
    """
    col = tl.arange(0, HALF)
    low = tl.load(source[:, None] + col[None, :], mask=valid[:, None], other=0.0)
    high = tl.load(source[:, None] + (HALF + col)[None, :], mask=valid[:, None], other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    square = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
    kind = target.dtype.element_ty
    if REST:
        end = 2 * HALF + tl.arange(0, REST)
        rest = tl.load(source[:, None] + end[None, :], mask=valid[:, None], other=0.0)
        wide_rest = rest.to(tl.float32)
        square += tl.sum(wide_rest * wide_rest, 1)
    inverse_rms = tl.rsqrt(square / D + eps)
    if REST:
        z = _scale(rest, inverse_rms, weight + end, NORM)
        tl.store(target[:, None] + end[None, :], z.to(kind), mask=valid[:, None])
    x = _scale(low, inverse_rms, weight + col, NORM)
    y = _scale(high, inverse_rms, weight + HALF + col, NORM)
    tl.store(target[:, None] + col[None, :], (x * c - y * s).to(kind), mask=valid[:, None])
    tl.store(target[:, None] + (HALF + col)[None, :], (y * c + x * s).to(kind), mask=valid[:, None])


@triton.jit
def _rotate_some(
    source,
    target,
    weight,
    cos,
    sin,
    token,
    valid,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """The same for any HALF."""
    col = tl.arange(0, D)
    # The partner of each dimension is read again (from cache) rather than shuffled: any HALF works.
    partner = tl.where(col < HALF, col + HALF, tl.where(col < 2 * HALF, col - HALF, col))
    raw = tl.load(source[:, None] + col[None, :], mask=valid[:, None], other=0.0)
    raw_partner = tl.load(source[:, None] + partner[None, :], mask=valid[:, None], other=0.0)
    wide = raw.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    value = _scale(raw, inverse_rms, weight + col, NORM)
    other = _scale(raw_partner, inverse_rms, weight + partner, NORM)
    turned = valid[:, None] & (col < 2 * HALF)[None, :]
    phase = token[:, None] * HALF + (col % HALF)[None, :]
    c = tl.load(cos + phase, mask=turned, other=1.0)
    s = tl.load(sin + phase, mask=turned, other=0.0)
    value = value * c + other * tl.where(col < HALF, -s, s)
    tl.store(target[:, None] + col[None, :], value.to(target.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["num_tokens", "group_length"])
def _qk_norm_rope_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    rows_out,
    num_tokens,
    group_length,
    eps,
    qkv_stride,
    q_stride_token,
    q_stride_head,
    rows_stride_group,
    rows_stride_head,
    rows_stride_row,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    REST: tl.constexpr = D - 2 * HALF
    PARTS: tl.constexpr = (HALF & (HALF - 1)) == 0 and (REST & (REST - 1)) == 0
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = token < num_tokens
    row = (token // group_length) * rows_stride_group + (token % group_length) * rows_stride_row
    col = tl.arange(0, D)
    if PARTS:
        phase = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
        c = tl.load(cos + phase, mask=valid[:, None], other=1.0)
        s = tl.load(sin + phase, mask=valid[:, None], other=0.0)
    for step in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + step
        source = qkv + token * qkv_stride + head * D
        if head < HQ:
            target = q_out + token * q_stride_token + head * q_stride_head
            if PARTS:
                _rotate_halves(source, target, q_weight, c, s, valid, eps, D, HALF, REST, Q_NORM)
            else:
                _rotate_some(source, target, q_weight, cos, sin, token, valid, eps, D, HALF, Q_NORM)
        elif head < HQ + H:
            target = rows_out + row + (head - HQ).to(tl.int64) * rows_stride_head
            if PARTS:
                _rotate_halves(source, target, k_weight, c, s, valid, eps, D, HALF, REST, K_NORM)
            else:
                _rotate_some(source, target, k_weight, cos, sin, token, valid, eps, D, HALF, K_NORM)
        elif head < HQ + 2 * H:
            if SHARED:
                source -= H * D
            raw = tl.load(source[:, None] + col[None, :], mask=valid[:, None], other=0.0)
            if V_NORM:
                wide = raw.to(tl.float32)
                raw = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]).to(raw.dtype)
            target = rows_out + row + (head - HQ - H).to(tl.int64) * rows_stride_head + D
            tl.store(target[:, None] + col[None, :], raw.to(rows_out.dtype.element_ty), mask=valid[:, None])


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    rows_out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    norm_values: bool = False,
) -> None:
    """See `herald_kernels.qk_norm_rope`. ``head_dim`` must be a power of two."""
    num_tokens, head_dim = q_out.shape[0], q_out.shape[2]
    strip = rotate_strip(num_tokens)
    all_heads = num_heads + 2 * num_kv_heads
    _qk_norm_rope_kernel[(triton.cdiv(num_tokens, strip.size), triton.cdiv(all_heads, strip.heads))](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        cos.contiguous(),
        sin.contiguous(),
        q_out,
        rows_out,
        num_tokens,
        rows_out.shape[2],
        eps,
        qkv.stride(0),
        q_out.stride(0),
        q_out.stride(1),
        rows_out.stride(0),
        rows_out.stride(1),
        rows_out.stride(2),
        HQ=num_heads,
        H=num_kv_heads,
        D=head_dim,
        HALF=cos.shape[1],
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        V_NORM=norm_values,
        SHARED=qkv.shape[1] == (num_heads + num_kv_heads) * head_dim,
        BLOCK=strip.size,
        HEADS=strip.heads,
        num_warps=strip.num_warps,
    )

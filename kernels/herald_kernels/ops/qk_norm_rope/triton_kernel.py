# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `qk_norm_rope`: a program takes one head of a few tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_T = 8


@triton.jit
def _norm(raw, inverse_rms, weight, col, NORM: tl.constexpr):
    """Values in float32 as they are after the norm's rounding to ``raw``'s dtype."""
    if NORM:
        value = (raw.to(tl.float32) * inverse_rms[:, None]).to(raw.dtype).to(tl.float32)
        scaled = value * tl.load(weight + col).to(tl.float32)[None, :]
        return scaled.to(raw.dtype).to(tl.float32)
    else:
        return raw.to(tl.float32)


@triton.jit
def _norm_rotate(
    source, weight, cos, sin, token, valid, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """[BLOCK_T, D] in float32 of the head whose first elements ``source`` points to."""
    col = tl.arange(0, D)
    # The partner of each dimension is read again (from cache) rather than shuffled: any R works.
    partner = tl.where(col < HALF, col + HALF, tl.where(col < 2 * HALF, col - HALF, col))
    raw = tl.load(source[:, None] + col[None, :], mask=valid[:, None], other=0.0)
    raw_partner = tl.load(source[:, None] + partner[None, :], mask=valid[:, None], other=0.0)
    wide = raw.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    value = _norm(raw, inverse_rms, weight, col, NORM)
    other = _norm(raw_partner, inverse_rms, weight, partner, NORM)

    turned = valid[:, None] & (col < 2 * HALF)[None, :]
    phase = token[:, None] * HALF + (col % HALF)[None, :]
    c = tl.load(cos + phase, mask=turned, other=1.0)
    s = tl.load(sin + phase, mask=turned, other=0.0)
    return value * c + other * tl.where(col < HALF, -s, s)


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
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    valid = token < num_tokens
    col = tl.arange(0, D)
    source = qkv + token * qkv_stride + head * D
    if head < HQ:
        value = _norm_rotate(source, q_weight, cos, sin, token, valid, eps, D, HALF, Q_NORM)
        target = q_out + token * q_stride_token + head * q_stride_head
        tl.store(target[:, None] + col[None, :], value.to(q_out.dtype.element_ty), mask=valid[:, None])
    else:
        row = (token // group_length) * rows_stride_group + (token % group_length) * rows_stride_row
        if head < HQ + H:
            key = _norm_rotate(source, k_weight, cos, sin, token, valid, eps, D, HALF, K_NORM)
            target = rows_out + row + (head - HQ).to(tl.int64) * rows_stride_head
            tl.store(target[:, None] + col[None, :], key.to(rows_out.dtype.element_ty), mask=valid[:, None])
        else:
            raw = tl.load(source[:, None] + col[None, :], mask=valid[:, None])
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
) -> None:
    """See `herald_kernels.qk_norm_rope`. ``head_dim`` must be a power of two."""
    num_tokens, head_dim = q_out.shape[0], q_out.shape[2]
    _qk_norm_rope_kernel[(triton.cdiv(num_tokens, BLOCK_T), num_heads + 2 * num_kv_heads)](
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
        BLOCK=BLOCK_T,
        num_warps=4,
    )

"""Torch reference of `qk_norm_rope`."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def _rms_norm(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[T, heads, D] normalised over D, in the dtype it came in."""
    if weight is None:
        return heads
    value = heads.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(heads.dtype) * weight


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] with its first ``2 * cos.shape[1]`` dimensions rotated, in float32."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = heads.float().split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


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
    """See `herald_kernels.qk_norm_rope`."""
    head_dim = q_out.shape[-1]
    groups, _, group_length, _ = rows_out.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    v = heads[:, -num_kv_heads:]
    if norm_values:
        v = F.rms_norm(v, (head_dim,), None, eps)
    q_out.copy_(_rotate(_rms_norm(q, q_weight, eps), cos, sin))
    keys, values = rows_out.transpose(1, 2).split(head_dim, dim=-1)
    keys.copy_(_rotate(_rms_norm(k, k_weight, eps), cos, sin).unflatten(0, (groups, group_length)))
    values.copy_(v.unflatten(0, (groups, group_length)))

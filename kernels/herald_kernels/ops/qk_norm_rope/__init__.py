"""Per-head RMS norm and rotary phase of Q and K, written to where attention reads them."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


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
    """Normalise and rotate the heads of a fused projection; K and V leave as rows.

    The norm is computed in float32 and rounded to the input's dtype before the weight multiplies it (as in
    the Qwen3 reference of transformers); the phase is applied in float32 and rounded once. Dimension i < R/2
    pairs with i + R/2; dimensions from R on pass through.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], unit stride in the last dimension. Without the
            heads of V its width is less by those, and V is the K that was given.
        q_weight: [head_dim] of qkv's dtype, or None for no norm.
        k_weight: likewise for K.
        cos: float32 [T, R/2], R <= head_dim.
        sin: likewise.
        q_out: [T, num_heads, head_dim], unit stride in the last dimension; written.
        rows_out: [groups, num_kv_heads, M, 2 * head_dim] with groups * M == T, any strides but a unit one in
            the last dimension; written. Token t is row t % M of group t // M: K, normed and rotated, then V.
        eps: of the RMS norm.
        norm_values: V passes an RMS norm without weights.

    Raises:
        ValueError: shapes or strides do not fit, or a weight has another dtype than qkv.
    """
    num_tokens, width = qkv.shape
    head_dim = q_out.shape[-1]
    shared = width == head_dim * (num_heads + num_kv_heads)
    groups, _, group_length, _ = rows_out.shape
    if q_out.shape != (num_tokens, num_heads, head_dim) or not (
        shared or width == head_dim * (num_heads + 2 * num_kv_heads)
    ):
        raise ValueError(
            f"qkv {tuple(qkv.shape)} of {num_heads} query and {num_kv_heads} KV heads does not match q_out "
            f"{tuple(q_out.shape)}"
        )
    if rows_out.shape[1::2] != (num_kv_heads, 2 * head_dim) or groups * group_length != num_tokens:
        raise ValueError(
            f"rows_out {tuple(rows_out.shape)} cannot take {num_tokens} tokens of {num_kv_heads} KV heads of "
            f"{head_dim}"
        )
    if cos.shape != sin.shape or cos.shape[0] != num_tokens or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} must be [{num_tokens}, at most {head_dim // 2}]"
        )
    for weight in (q_weight, k_weight):
        if weight is not None and (weight.shape != (head_dim,) or weight.dtype != qkv.dtype):
            raise ValueError(
                f"norm weight {tuple(weight.shape)} {weight.dtype} must be [{head_dim}] {qkv.dtype}"
            )
    need_unit_stride(qkv=qkv, q_out=q_out, rows_out=rows_out)
    if num_tokens:
        implementation("qk_norm_rope", qkv.device.type)(
            qkv, q_weight, k_weight, cos, sin, q_out, rows_out, num_heads, num_kv_heads, eps, norm_values
        )

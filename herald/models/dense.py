"""Plain torch forward of a whole sequence: the reference that cached and sparse paths are held to."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from herald.models.base import BlockModel


def block_causal(num_positions: int, block_length: int, device: torch.device) -> torch.Tensor:
    """[n, n] bool: position i sees position j iff j's block is not after i's."""
    block = torch.arange(num_positions, device=device) // block_length
    return block[None, :] <= block[:, None]


def norm_and_rotate(
    heads: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """RMSNorm over each head, then rotation of dim i with dim i + R/2; those from R on stay.

    ``heads`` [T, heads, D], ``weight`` [D] or None for no norm, ``cos``/``sin`` [T, R/2] float32.
    """
    if weight is not None:
        wide = heads.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        heads = wide.to(heads.dtype) * weight
    half = cos.shape[-1]
    first, second, rest = heads.float().split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(heads.dtype)


def dense_logits(model: BlockModel, input_ids: torch.Tensor) -> torch.Tensor:
    """See `BlockModel.dense_logits`."""
    config = model.config
    counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    num_positions = len(input_ids)
    block = num_positions if config.full_attention else config.block_length
    visible = block_causal(num_positions, block, model.device)
    cos, sin = model.rope(torch.arange(num_positions, device=model.device))
    hidden = model.embed(input_ids.to(model.device))
    for layer in range(config.num_layers):
        qkv = model.qkv(layer, hidden).view(num_positions, sum(counts), config.head_dim)
        q, k, v = qkv.split(counts, dim=1)
        q_weight, k_weight = model.qk_norm_weights(layer)
        q = norm_and_rotate(q, q_weight, config.rms_norm_eps, cos, sin)
        k = norm_and_rotate(k, k_weight, config.rms_norm_eps, cos, sin)
        attention = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=visible,
            scale=model.softmax_scale,
            enable_gqa=True,
        )
        hidden = model.finish_layer(layer, hidden, attention[0].transpose(0, 1).flatten(1))
    return model.logits(hidden).float()

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


def canvas_logits(
    model: BlockModel,
    prefix_ids: torch.Tensor,
    canvas_ids: torch.Tensor,
    signal: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One denoising step of a canvas behind its prefix, in plain torch, of a family that has a canvas.

    The prefix is encoded causally, in layers with a window within it. The canvas sees all of itself and the
    prefix, in layers with a window the last positions of it, the same for every position of the canvas.

    Args:
        prefix_ids: int64 [n].
        canvas_ids: int64 [B].
        signal: [B, hidden_size], see `BlockModel.condition`; None before the first step.

    Returns:
        The prefix's hidden states after the last layer, [n, hidden_size], and logits float32 [B, vocab_size].
    """
    length, size, device = len(prefix_ids), len(canvas_ids), model.device
    positions = torch.arange(length + size, device=device)
    causal = (positions < length)[:, None]
    hidden = model.embed(torch.cat([prefix_ids, canvas_ids]).to(device))
    given = torch.zeros_like(hidden)
    if signal is not None:
        given[length:] = signal
    hidden = model.condition(hidden, given, causal)
    phases = [model.rope(positions, windowed) for windowed in (False, True)]
    for layer, shape in enumerate(model.config.attention):
        cos, sin = phases[shape.window > 0]
        projected = model.qkv(layer, hidden).unflatten(1, (-1, shape.head_dim))
        q, k = (
            projected[:, : -2 * shape.num_kv_heads],
            projected[:, -2 * shape.num_kv_heads : -shape.num_kv_heads],
        )
        v = projected[:, -shape.num_kv_heads :]
        if projected.shape[1] == model.config.num_heads + shape.num_kv_heads:
            q, k = projected[:, : -shape.num_kv_heads], v
        q_weight, k_weight = model.qk_norm_weights(layer)
        eps = model.config.rms_norm_eps
        if model.norm_values:
            v = F.rms_norm(v, v.shape[-1:], None, eps)
        attention = F.scaled_dot_product_attention(
            norm_and_rotate(q, q_weight, eps, cos, sin).transpose(0, 1)[None],
            norm_and_rotate(k, k_weight, eps, cos, sin).transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=_canvas_sees(positions, length, shape.window),
            scale=model.softmax_scale,
            enable_gqa=True,
        )
        hidden = model.finish_layer(layer, hidden, attention[0].transpose(0, 1).flatten(1), causal)
    return hidden[:length], model.logits(hidden[length:]).float()


def _canvas_sees(positions: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """[n, n] bool: what each position sees where those from ``length`` on are a canvas."""
    query = positions.clamp(max=length)[:, None]  # as the first of the canvas
    seen = (positions <= positions[:, None]) | (positions[:, None] >= length)
    return seen & (positions >= query - window) if window else seen

"""Torch reference of `prefill_attention`, on scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# Limits the mask of one call (four bytes an element inside torch) and so the memory of a long prompt.
MASK_ELEMENTS = 1 << 23


def prefill_attention(
    q: torch.Tensor, rows: torch.Tensor, q_start: int, block_length: int, scale: float, window: int = 0
) -> torch.Tensor:
    """See `herald_kernels.prefill_attention`."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_rows, _ = rows.shape
    group = num_heads // num_kv_heads
    keys, values = rows[None].split(head_dim, dim=-1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = max(1, MASK_ELEMENTS // (group * num_rows))
    for first in range(0, num_queries, step):
        chunk = q[first : first + step]
        position = torch.arange(q_start + first, q_start + first + chunk.shape[0], device=q.device)
        end = ((position // block_length + 1) * block_length).clamp(max=num_rows)
        visible = int(end[-1])
        mask = None
        if int(end[0]) != visible or window:
            row = torch.arange(visible, device=q.device)
            mask = row < end.repeat_interleave(group)[:, None]
            if window:
                mask &= row >= (position - window).repeat_interleave(group)[:, None]
        # The query heads of a KV head stand below each other, so that no key or value is repeated in memory.
        query = chunk.unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2)[None]
        result = scaled_dot_product_attention(
            query, keys[:, :, :visible], values[:, :, :visible], attn_mask=mask, scale=scale
        )
        target = out[first : first + step].unflatten(1, (num_kv_heads, group)).transpose(0, 1)
        target.copy_(result[0].unflatten(1, (-1, group)))
    return out

"""A Llama forward over a whole text that gives what attention sees: keys and queries after rotary embedding.

Weights have the names and the layout of a GGUF file, in which the rotary embedding turns neighbouring
dimensions (2i, 2i + 1). That order of dimensions is another than in the published checkpoint, and changes no
dot product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

# Positions whose logits are computed together.
_CHUNK = 256


@dataclass(frozen=True)
class Shape:
    """A Llama model: sizes, base of the rotary embedding, epsilon of its RMS norms."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True)
class Captured:
    """Keys of every position of a text and queries of some.

    Attributes:
        keys: float32 [L, H, T, D], after rotary embedding.
        queries: float32 [L, P, Hq, D], after rotary embedding; query heads ``h * G .. (h + 1) * G`` read KV
            head h.
        positions: int64 [P], ascending, where the queries stand.
        bits_per_token: what the model needs for a token of the second half, or None.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor
    bits_per_token: float | None = None

    def __post_init__(self) -> None:
        layers, heads, _, dim = self.keys.shape
        count, query_heads = self.queries.shape[1:3]
        if self.queries.shape != (layers, count, query_heads, dim) or query_heads % heads:
            raise ValueError(f"queries {self.queries.shape} do not fit keys {self.keys.shape}")
        if self.positions.shape != (count,):
            raise ValueError(f"{count} queries at {self.positions.shape} positions")

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.keys.shape[3] ** -0.5

    def at(self, first: int, last: int) -> torch.Tensor:
        """Queries of the positions ``first .. last``, float32 [L, last - first, Hq, D]."""
        rows = torch.searchsorted(self.positions, torch.arange(first, last))
        if rows.max() >= len(self.positions) or (self.positions[rows] != torch.arange(first, last)).any():
            raise ValueError(f"no queries were kept for all of the positions {first} to {last}")
        return self.queries[:, rows]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of ``x`` [H, T, D] at the positions 0 .. T; dimensions 2i and 2i + 1 turn together."""
    _, length, dim = x.shape
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    cos, sin = angles.cos().float(), angles.sin().float()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@torch.inference_mode()
def capture(
    shape: Shape, tensor: Callable[[str], torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor
) -> Captured:
    """Run the model over ``tokens`` int64 [T] and keep all keys, and the queries at ``positions`` int64 [P].

    Args:
        tensor: a weight by name, float32, [out, in]; layers ask for theirs one after the other.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    keys = torch.empty(shape.num_layers, kv_heads, len(tokens), dim)
    queries = torch.empty(shape.num_layers, len(positions), heads, dim)
    embedding = tensor("token_embd.weight")
    x = embedding[tokens]
    for layer in range(shape.num_layers):

        def weight(name: str, layer: int = layer) -> torch.Tensor:
            return tensor(f"blk.{layer}.{name}.weight")

        hidden = rms_norm(x, weight("attn_norm"), shape.norm_eps)
        q = rotary(
            (hidden @ weight("attn_q").T).unflatten(-1, (heads, dim)).transpose(0, 1), shape.rope_theta
        )
        k = rotary(
            (hidden @ weight("attn_k").T).unflatten(-1, (kv_heads, dim)).transpose(0, 1), shape.rope_theta
        )
        v = (hidden @ weight("attn_v").T).unflatten(-1, (kv_heads, dim)).transpose(0, 1)
        keys[layer] = k
        queries[layer] = q[:, positions].transpose(0, 1)
        group = heads // kv_heads
        attended = F.scaled_dot_product_attention(
            q[None], k.repeat_interleave(group, 0)[None], v.repeat_interleave(group, 0)[None], is_causal=True
        )
        x = x + attended[0].transpose(0, 1).flatten(1) @ weight("attn_output").T
        hidden = rms_norm(x, weight("ffn_norm"), shape.norm_eps)
        gated = F.silu(hidden @ weight("ffn_gate").T) * (hidden @ weight("ffn_up").T)
        x = x + gated @ weight("ffn_down").T
    hidden = rms_norm(x, tensor("output_norm.weight"), shape.norm_eps)
    return Captured(keys, queries, positions, _bits_per_token(hidden, embedding, tokens))


def _bits_per_token(hidden: torch.Tensor, embedding: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean cross entropy, in bits, of the second half's tokens; the embedding is the output layer too."""
    total, begin, end = 0.0, len(tokens) // 2, len(tokens) - 1
    for first in range(begin, end, _CHUNK):
        last = min(first + _CHUNK, end)
        logits = hidden[first:last] @ embedding.T
        total += F.cross_entropy(logits, tokens[first + 1 : last + 1], reduction="sum").item()
    return total / (end - begin) / torch.log(torch.tensor(2.0)).item()


def random_captured(tokens: int, positions: torch.Tensor, seed: int = 0) -> Captured:
    """Gaussian keys and queries of a small shape, sharp enough that some rows stand out."""
    layers, kv_heads, group, dim = 2, 2, 2, 32
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(layers, kv_heads, tokens, dim, generator=generator)
    queries = torch.randn(layers, len(positions), kv_heads * group, dim, generator=generator)
    return Captured(keys, 2 * queries, positions)

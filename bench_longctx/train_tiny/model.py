"""The model `tiny`: a small SDAR block-diffusion transformer (Qwen3's layers, block-causal attention).

Module names give the checkpoint's weight names. Three forwards share the layers: packed training rows under a
FlexAttention block mask, the same packed rows without gradient to fill a KV cache, and decoding lanes of one
block each against that cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True)
class TinyConfig:
    """Shape of the model; the field names are those of config.json."""

    hidden_size: int = 320
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    vocab_size: int = 264
    block_size: int = 16
    max_position_embeddings: int = 32768
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    @classmethod
    def from_dict(cls, values: dict) -> TinyConfig:
        """Take the known fields of a config.json."""
        return cls(**{k: v for k, v in values.items() if k in asdict(cls())})


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rope_tables(positions: Tensor, config: TinyConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., head_dim] float32 of `positions` [...] int64."""
    inverse = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    )
    angles = positions.float().unsqueeze(-1) * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., tokens, heads, head_dim]; tables are [..., tokens, head_dim]."""
    a, b = x.chunk(2, -1)
    y = x.float() * cos.unsqueeze(-2) + torch.cat((-b, a), -1).float() * sin.unsqueeze(-2)
    return y.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head."""

    def __init__(self, c: TinyConfig):
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: [..., tokens, heads, head_dim]."""
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        return q, k, self.v_proj(x).view(heads)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: TinyConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: TinyConfig):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows x [tokens, hidden] under a block mask, or a dense bool mask [tokens, tokens].

        Returns the output and the rows' keys and values [tokens, kv_heads, head_dim].
        """
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        if isinstance(mask, BlockMask):
            y = flex_attention(*heads, block_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        x = x + self.self_attn.o_proj(y.squeeze(0).transpose(0, 1).flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x)), k, v

    def decode(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lanes x [lanes, block, hidden], each against its own cached rows and itself.

        cache: keys and values [lanes, kv_heads, rows, head_dim]; visible [lanes, rows] bool. Returns the
        output and the lanes' keys and values [lanes, kv_heads, block, head_dim].
        """
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        lanes, block, heads, dim = q.shape
        kv_heads = k.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        # Grouped heads become query rows, so that no key is copied.
        q = (
            q.view(lanes, block, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(lanes, kv_heads, -1, dim)
            * dim**-0.5
        )
        past = (q @ cache[0].transpose(-1, -2)).float().masked_fill_(~visible[:, None, None], float("-inf"))
        own = (q @ k.transpose(-1, -2)).float()
        weights = torch.cat((past, own), -1).softmax(-1).to(v.dtype)
        rows = past.shape[-1]
        y = weights[..., :rows] @ cache[1] + weights[..., rows:] @ v
        y = y.view(lanes, kv_heads, -1, block, dim).permute(0, 3, 1, 2, 4).reshape(lanes, block, heads * dim)
        x = x + self.self_attn.o_proj(y)
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Body(nn.Module):
    """Embedding, layers and last norm (`model.` in the weight names)."""

    def __init__(self, c: TinyConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class TinySDAR(nn.Module):
    """The language model; input and output embeddings are tied."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: BlockMask | Tensor,
        rows: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Last hidden states [tokens, hidden] of packed rows; each layer's keys and values go to `rows`."""
        x = self.model.embed_tokens(tokens)
        cos, sin = rope_tables(positions, self.config)
        for layer in self.model.layers:
            x, k, v = layer(x, cos, sin, mask)
            if rows is not None:
                rows.append((k, v))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits in float32."""
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight).float()

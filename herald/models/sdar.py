"""SDAR, dense: a Qwen3 decoder that attends within a block in both directions (arXiv:2510.06303)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from herald.models.base import BlockModel
from herald.models.config import ModelConfig
from herald.models.weights import Parameter, Source
from herald_kernels import rms_norm, silu_mul

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass
class SdarLayer:
    """Weights of one layer; ``qkv`` and ``gate_up`` are joined when they are read."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 num_kv_heads) * head_dim, hidden]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    output: torch.Tensor  # [hidden, num_heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None


def layer_map(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Field of `SdarLayer` -> checkpoint names below ``model.layers.N.`` and their shapes."""
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    fields: dict[str, dict[str, tuple[int, ...]]] = {
        "input_norm": {"input_layernorm.weight": (hidden,)},
        "qkv": {
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
        },
        "q_norm": {"self_attn.q_norm.weight": (head_dim,)},
        "k_norm": {"self_attn.k_norm.weight": (head_dim,)},
        "output": {"self_attn.o_proj.weight": (hidden, q_size)},
        "mlp_norm": {"post_attention_layernorm.weight": (hidden,)},
        "gate_up": {"mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden)},
        "down": {"mlp.down_proj.weight": (hidden, mlp)},
    }
    if config.attention_bias:
        fields["qkv_bias"] = {
            "self_attn.q_proj.bias": (q_size,),
            "self_attn.k_proj.bias": (kv_size,),
            "self_attn.v_proj.bias": (kv_size,),
        }
        fields["output_bias"] = {"self_attn.o_proj.bias": (hidden,)}
    return fields


class SdarModel(BlockModel):
    """See `BlockModel`."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, tensors)
        self.embedding = tensors[EMBEDDING]
        self.final_norm = tensors[FINAL_NORM]
        self.head = self.embedding if config.tie_word_embeddings else tensors[HEAD]
        fields = layer_map(config)
        self.layers = [
            SdarLayer(**{field: tensors[f"{index}.{field}"] for field in fields})
            for index in range(config.num_layers)
        ]

    @classmethod
    def parameters(cls, config: ModelConfig) -> list[Parameter]:
        table = (config.vocab_size, config.hidden_size)
        found = [
            Parameter(EMBEDDING, (Source(EMBEDDING, table),)),
            Parameter(FINAL_NORM, (Source(FINAL_NORM, (config.hidden_size,)),)),
        ]
        if not config.tie_word_embeddings:
            found.append(Parameter(HEAD, (Source(HEAD, table),)))
        for index in range(config.num_layers):
            for field, names in layer_map(config).items():
                sources = tuple(
                    Source(f"model.layers.{index}.{name}", shape) for name, shape in names.items()
                )
                found.append(Parameter(f"{index}.{field}", sources))
        return found

    @classmethod
    def tolerated(cls, config: ModelConfig) -> frozenset[str]:
        # exporters may store the head of a tied model as well; the embedding is the truth
        return frozenset({HEAD}) if config.tie_word_embeddings else frozenset()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.embedding)

    def qkv(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.layers[layer]
        return F.linear(self._norm(hidden, weights.input_norm), weights.qkv, weights.qkv_bias)

    def qk_norm_weights(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.layers[layer].q_norm, self.layers[layer].k_norm

    def finish_layer(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        weights = self.layers[layer]
        # the residual is what the product is added to: no kernel of its own, and one rounding less
        if weights.output_bias is not None:
            hidden.add_(weights.output_bias)
        hidden.addmm_(attention, weights.output.T)
        gate_up = F.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up)
        return hidden.addmm_(silu_mul(gate_up), weights.down.T)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(hidden, self.final_norm), self.head)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # it rounds once where the published code rounds before and after the weight
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

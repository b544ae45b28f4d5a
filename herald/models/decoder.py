"""`DecoderModel`: what families share whose layers are norm, attention, norm, MLP, each with its residual."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from herald.models import moe
from herald.models.base import BlockModel
from herald.models.config import ModelConfig
from herald.models.weights import Parameter, Source
from herald_kernels import rms_norm, silu_mul

# Field of `LayerWeights` -> names below the layer's prefix -> shape; a field of several names is joined.
LayerMap = dict[str, dict[str, tuple[int, ...]]]


@dataclass
class LayerWeights:
    """Weights of one layer. It has a plain MLP (``gate_up``, ``down``) or ``experts``."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 num_kv_heads) * head_dim, hidden]
    output: torch.Tensor  # [hidden, num_heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    gate_up: torch.Tensor | None = None  # [2 * intermediate, hidden]
    down: torch.Tensor | None = None  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    experts: moe.ExpertWeights | None = None


class DecoderModel(BlockModel):
    """See `BlockModel`. A family gives the names of its tensors.

    Attributes:
        embedding_name, final_norm_name, head_name: in the checkpoint.
        layer_prefix: before the names of a layer; ``{}`` is its index.
    """

    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    final_norm_name: ClassVar[str] = "model.norm.weight"
    head_name: ClassVar[str] = "lm_head.weight"
    layer_prefix: ClassVar[str] = "model.layers.{}."

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, tensors)
        self.embedding = tensors[self.embedding_name]
        self.final_norm = tensors[self.final_norm_name]
        self.head = self.embedding if config.tie_word_embeddings else tensors[self.head_name]
        self.layers = [self._layer(index, tensors) for index in range(config.num_layers)]

    @classmethod
    @abstractmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        """Tensors of a layer."""

    @classmethod
    def parameters(cls, config: ModelConfig) -> list[Parameter]:
        table = (config.vocab_size, config.hidden_size)
        found = [
            Parameter(cls.embedding_name, (Source(cls.embedding_name, table),)),
            Parameter(cls.final_norm_name, (Source(cls.final_norm_name, (config.hidden_size,)),)),
        ]
        if not config.tie_word_embeddings:
            found.append(Parameter(cls.head_name, (Source(cls.head_name, table),)))
        for index in range(config.num_layers):
            prefix = cls.layer_prefix.format(index)
            for field, names in cls.layer_map(config, index).items():
                dtype = torch.float32 if field in moe.FLOAT32 else None
                sources = tuple(Source(prefix + name, shape, dtype) for name, shape in names.items())
                found.append(Parameter(f"{index}.{field}", sources))
        return found

    @classmethod
    def tolerated(cls, config: ModelConfig) -> frozenset[str]:
        # exporters may store the head of a tied model as well; the embedding is the truth
        return frozenset({cls.head_name}) if config.tie_word_embeddings else frozenset()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.embedding)

    def qkv(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.layers[layer]
        return F.linear(self._norm(hidden, weights.input_norm), weights.qkv, weights.qkv_bias)

    def qk_norm_weights(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.layers[layer].q_norm, self.layers[layer].k_norm

    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor, causal: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights = self.layers[layer]
        # the residual is what the product is added to: no kernel of its own, and one rounding less
        if weights.output_bias is not None:
            hidden.add_(weights.output_bias)
        hidden.addmm_(attention, weights.output.T)
        normed = self._norm(hidden, weights.mlp_norm)
        if weights.experts is not None:
            assert self.config.moe is not None
            return moe.add_experts(hidden, normed, weights.experts, self.config.moe)
        assert weights.gate_up is not None and weights.down is not None
        return hidden.addmm_(silu_mul(F.linear(normed, weights.gate_up)), weights.down.T)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(hidden, self.final_norm), self.head)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # it rounds once where the published code rounds before and after the weight
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

    def _layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> LayerWeights:
        fields = self.layer_map(self.config, index)
        own = {field: tensors[f"{index}.{field}"] for field in fields}
        experts = {field: own.pop(field) for field in fields if field in moe.FIELDS}
        joined = moe.expert_weights(experts, self.config, self.dtype) if experts else None
        return LayerWeights(experts=joined, **own)

"""DiffusionGemma: Gemma 4 with experts, which denoises a canvas of random tokens.

One set of weights encodes the prompt and finished blocks causally and denoises a canvas, whose positions see
each other; the two differ in the scalar of each layer and in the input, which for a canvas is conditioned on
the probabilities of the step before. Architecture as in `transformers` (``models/diffusion_gemma``), names as
released.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from herald.errors import UsageError
from herald.models import moe
from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap, LayerWeights
from herald.models.moe import Shapes, mlp_names
from herald.models.weights import Parameter, Source
from herald_kernels import gelu_mul, rms_norm

_CONDITIONING = "model.decoder.self_conditioning"
_CAUSAL_SCALAR = "model.encoder.language_model.layers.{}.layer_scalar"
# On the residual that the router reads; it joins the router's weights when they are loaded.
_ROUTER_SCALE = "router_scale"


@dataclass
class GemmaLayer(LayerWeights):
    """See `LayerWeights`. Both branches of the MLP are normed on their own, and their sum again.

    Attributes:
        attention_norm: [hidden], of what attention adds; ``mlp_norm`` stands before the dense branch.
        dense_norm: [hidden], after the dense branch.
        expert_norm, routed_norm: [hidden], before the experts, and after them.
        output_norm: [hidden], of the sum of both branches.
        canvas_scalar, causal_scalar: [1], factors on the output of the layer.
    """

    attention_norm: torch.Tensor | None = None
    dense_norm: torch.Tensor | None = None
    expert_norm: torch.Tensor | None = None
    routed_norm: torch.Tensor | None = None
    output_norm: torch.Tensor | None = None
    canvas_scalar: torch.Tensor | None = None
    causal_scalar: torch.Tensor | None = None


class DiffusionGemmaModel(DecoderModel):
    """See `BlockModel`."""

    embedding_name: ClassVar[str] = "model.decoder.embed_tokens.weight"
    final_norm_name: ClassVar[str] = "model.decoder.norm.weight"
    layer_prefix: ClassVar[str] = "model.decoder.layers.{}."
    norm_values: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, tensors)
        self.softmax_scale = 1.0
        # rounded to the weights' dtype, as the published code rounds it
        self.embedding_scale = torch.tensor(config.hidden_size**0.5).to(self.dtype).item()
        self.signal_norm = tensors[f"{_CONDITIONING}.norm"]
        self.signal_gate_up = tensors[f"{_CONDITIONING}.gate_up"]
        self.signal_down = tensors[f"{_CONDITIONING}.down"]

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        assert config.moe is not None
        shape, hidden, experts = config.attention[layer], config.hidden_size, config.moe.num_experts
        q_size, kv_size = config.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        projections: Shapes = {
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
        }
        if shape.window:  # elsewhere the values are the keys as they are projected
            projections["self_attn.v_proj.weight"] = (kv_size, hidden)
        gate_up, down = mlp_names("mlp", hidden, config.intermediate_size)
        inner = config.moe.intermediate_size
        return {
            "input_norm": {"input_layernorm.weight": (hidden,)},
            "qkv": projections,
            "q_norm": {"self_attn.q_norm.weight": (shape.head_dim,)},
            "k_norm": {"self_attn.k_norm.weight": (shape.head_dim,)},
            "output": {"self_attn.o_proj.weight": (hidden, q_size)},
            "attention_norm": {"post_attention_layernorm.weight": (hidden,)},
            "mlp_norm": {"pre_feedforward_layernorm.weight": (hidden,)},
            "gate_up": gate_up,
            "down": down,
            "dense_norm": {"post_feedforward_layernorm_1.weight": (hidden,)},
            "expert_norm": {"pre_feedforward_layernorm_2.weight": (hidden,)},
            "routed_norm": {"post_feedforward_layernorm_2.weight": (hidden,)},
            "output_norm": {"post_feedforward_layernorm.weight": (hidden,)},
            "router": {"router.proj.weight": (experts, hidden)},
            "router_scale": {"router.scale": (hidden,)},
            "expert_scale": {"router.per_expert_scale": (experts,)},
            "expert_gate_up": {"experts.gate_up_proj": (experts, 2 * inner, hidden)},
            "expert_down": {"experts.down_proj": (experts, hidden, inner)},
            "canvas_scalar": {"layer_scalar": (1,)},
        }

    @classmethod
    def parameters(cls, config: ModelConfig) -> list[Parameter]:
        found = super().parameters(config)
        for layer in range(config.num_layers):
            source = Source(_CAUSAL_SCALAR.format(layer), (1,))
            found.append(Parameter(f"{layer}.causal_scalar", (source,)))
        hidden = config.hidden_size
        gate_up, down = mlp_names(_CONDITIONING, hidden, config.intermediate_size)
        norm: Shapes = {f"{_CONDITIONING}.pre_norm.weight": (hidden,)}
        for field, names in {"norm": norm, "gate_up": gate_up, "down": down}.items():
            sources = tuple(Source(name, shape) for name, shape in names.items())
            found.append(Parameter(f"{_CONDITIONING}.{field}", sources))
        return found

    @classmethod
    def tolerated(cls, config: ModelConfig) -> frozenset[str]:
        # what sees pictures, and copies of shared weights under the encoder's names
        return super().tolerated(config) | {"model.encoder.*"}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * self.embedding_scale

    def condition(self, hidden: torch.Tensor, signal: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(self._norm(signal, self.signal_norm), self.signal_gate_up)
        mixed = hidden + F.linear(gelu_mul(gate_up), self.signal_down)
        return torch.where(causal, hidden, rms_norm(mixed, None, self.config.rms_norm_eps))

    def soft_embedding(self, probabilities: torch.Tensor) -> torch.Tensor:
        return (probabilities @ self.embedding) * self.embedding_scale

    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor, causal: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights = self.layers[layer]
        assert isinstance(weights, GemmaLayer) and weights.experts is not None and causal is not None
        assert weights.gate_up is not None and weights.down is not None and self.config.moe is not None
        hidden.add_(self._norm(F.linear(attention, weights.output), weights.attention_norm))
        gate_up = F.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up)
        dense = F.linear(gelu_mul(gate_up), weights.down)
        routed = moe.add_experts(
            torch.zeros_like(hidden),
            self._norm(hidden, weights.expert_norm),
            weights.experts,
            self.config.moe,
            routed=rms_norm(hidden, None, self.config.rms_norm_eps),
        )
        both = self._norm(dense, weights.dense_norm).add_(self._norm(routed, weights.routed_norm))
        hidden.add_(self._norm(both, weights.output_norm))
        assert weights.causal_scalar is not None and weights.canvas_scalar is not None
        return hidden.mul_(torch.where(causal, weights.causal_scalar, weights.canvas_scalar))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `BlockModel.logits`, but float32: the cap is applied to the rounded products, as published."""
        raw, cap = super().logits(hidden).float(), self.config.softcap
        return raw.div_(cap).tanh_().mul_(cap) if cap else raw

    def dense_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise UsageError(
            f"{self.config.family} predicts a canvas, and no sequence in blocks",
            "use herald.models.dense.canvas_logits",
        )

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

    def _layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> LayerWeights:
        own = {field: tensors[f"{index}.{field}"] for field in self.layer_map(self.config, index)}
        experts = {field: own.pop(field) for field in list(own) if field in moe.FIELDS}
        scale = own.pop(_ROUTER_SCALE).float() * self.config.hidden_size**-0.5
        experts["router"] = experts["router"] * scale
        joined = moe.expert_weights(experts, self.config, self.dtype)
        return GemmaLayer(experts=joined, causal_scalar=tensors[f"{index}.causal_scalar"], **own)

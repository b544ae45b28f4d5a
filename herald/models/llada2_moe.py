"""LLaDA2.0 and 2.1: experts with a grouped sigmoid router, half of each head rotated (arXiv:2512.15745)."""

from __future__ import annotations

from typing import ClassVar

from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap
from herald.models.moe import expert_names, mlp_names


class Llada2MoeModel(DecoderModel):
    """See `BlockModel`."""

    embedding_name: ClassVar[str] = "model.word_embeddings.weight"

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        assert config.moe is not None
        hidden, head_dim, experts = config.hidden_size, config.head_dim, config.moe.num_experts
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        fields: LayerMap = {
            "input_norm": {"input_layernorm.weight": (hidden,)},
            "qkv": {"attention.query_key_value.weight": (q_size + 2 * kv_size, hidden)},
            "q_norm": {"attention.query_layernorm.weight": (head_dim,)},
            "k_norm": {"attention.key_layernorm.weight": (head_dim,)},
            "output": {"attention.dense.weight": (hidden, q_size)},
            "mlp_norm": {"post_attention_layernorm.weight": (hidden,)},
        }
        if layer < config.moe.first_dense_layers:
            gate_up, down = mlp_names("mlp", hidden, config.intermediate_size)
            return fields | {"gate_up": gate_up, "down": down}
        return (
            fields
            | {"router": {"mlp.gate.weight": (experts, hidden)}}
            | {"router_bias": {"mlp.gate.expert_bias": (experts,)}}
            | expert_names("mlp", hidden, config.moe)
        )

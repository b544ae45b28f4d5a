"""SDAR, dense: a Qwen3 decoder that attends within a block in both directions (arXiv:2510.06303)."""

from __future__ import annotations

from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap


def attention_map(config: ModelConfig) -> LayerMap:
    """Tensors of a layer but for its MLP."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    fields: LayerMap = {
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
    }
    if config.attention_bias:
        fields["qkv_bias"] = {
            "self_attn.q_proj.bias": (q_size,),
            "self_attn.k_proj.bias": (kv_size,),
            "self_attn.v_proj.bias": (kv_size,),
        }
        fields["output_bias"] = {"self_attn.o_proj.bias": (hidden,)}
    return fields


class SdarModel(DecoderModel):
    """See `BlockModel`."""

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        hidden, mlp = config.hidden_size, config.intermediate_size
        return attention_map(config) | {
            "gate_up": {"mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden)},
            "down": {"mlp.down_proj.weight": (hidden, mlp)},
        }

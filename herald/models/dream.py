"""Dream-7B: a Qwen2 decoder without a causal mask, whose row i-1 predicts position i (arXiv:2508.15487)."""

from __future__ import annotations

from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap
from herald.models.moe import mlp_names


class DreamModel(DecoderModel):
    """See `BlockModel`. Every position sees every position."""

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        hidden, head_dim = config.hidden_size, config.head_dim
        sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        rows = {f"self_attn.{name}_proj": heads * head_dim for name, heads in sizes.items()}
        gate_up, down = mlp_names("mlp", hidden, config.intermediate_size)
        return {
            "input_norm": {"input_layernorm.weight": (hidden,)},
            "qkv": {f"{name}.weight": (size, hidden) for name, size in rows.items()},
            "qkv_bias": {f"{name}.bias": (size,) for name, size in rows.items()},
            "output": {"self_attn.o_proj.weight": (hidden, config.num_heads * head_dim)},
            "mlp_norm": {"post_attention_layernorm.weight": (hidden,)},
            "gate_up": gate_up,
            "down": down,
        }

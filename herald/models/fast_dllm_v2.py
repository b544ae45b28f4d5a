"""Fast-dLLM v2: a Qwen2.5 decoder trained on to denoise blocks (arXiv:2509.26328).

Queries, keys and values have biases and no norms; row i - 1 predicts position i, as in Qwen2.5 itself.
"""

from __future__ import annotations

from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap
from herald.models.moe import mlp_names


class FastDllmV2Model(DecoderModel):
    """See `BlockModel`."""

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        hidden, head_dim = config.hidden_size, config.head_dim
        sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        gate_up, down = mlp_names("mlp", hidden, config.intermediate_size)
        return {
            "input_norm": {"input_layernorm.weight": (hidden,)},
            "qkv": {f"self_attn.{p}_proj.weight": (n * head_dim, hidden) for p, n in sizes.items()},
            "qkv_bias": {f"self_attn.{p}_proj.bias": (n * head_dim,) for p, n in sizes.items()},
            "output": {"self_attn.o_proj.weight": (hidden, config.num_heads * head_dim)},
            "mlp_norm": {"post_attention_layernorm.weight": (hidden,)},
            "gate_up": gate_up,
            "down": down,
        }

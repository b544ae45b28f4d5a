"""LLaDA-8B and LLaDA-1.5: a Llama decoder without a causal mask (arXiv:2502.09992, arXiv:2505.19223)."""

from __future__ import annotations

from typing import ClassVar

from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap


class LladaModel(DecoderModel):
    """See `BlockModel`. Every position sees every position."""

    embedding_name: ClassVar[str] = "model.transformer.wte.weight"
    final_norm_name: ClassVar[str] = "model.transformer.ln_f.weight"
    head_name: ClassVar[str] = "model.transformer.ff_out.weight"
    layer_prefix: ClassVar[str] = "model.transformer.blocks.{}."

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        hidden, head_dim, mlp = config.hidden_size, config.head_dim, config.intermediate_size
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        return {
            "input_norm": {"attn_norm.weight": (hidden,)},
            "qkv": {
                "q_proj.weight": (q_size, hidden),
                "k_proj.weight": (kv_size, hidden),
                "v_proj.weight": (kv_size, hidden),
            },
            "output": {"attn_out.weight": (hidden, q_size)},
            "mlp_norm": {"ff_norm.weight": (hidden,)},
            # ff_proj is the gate; a layer's ff_out is the way down, the model's is the head
            "gate_up": {"ff_proj.weight": (mlp, hidden), "up_proj.weight": (mlp, hidden)},
            "down": {"ff_out.weight": (hidden, mlp)},
        }

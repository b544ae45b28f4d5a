"""SDAR with experts: the attention of SDAR, the experts of Qwen3-MoE in every layer (arXiv:2510.06303)."""

from __future__ import annotations

from herald.models.config import ModelConfig
from herald.models.decoder import DecoderModel, LayerMap
from herald.models.moe import expert_names
from herald.models.sdar import attention_map


class SdarMoeModel(DecoderModel):
    """See `BlockModel`."""

    @classmethod
    def layer_map(cls, config: ModelConfig, layer: int) -> LayerMap:
        assert config.moe is not None
        router: LayerMap = {"router": {"mlp.gate.weight": (config.moe.num_experts, config.hidden_size)}}
        return attention_map(config) | router | expert_names("mlp", config.hidden_size, config.moe)

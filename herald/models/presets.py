"""Shapes of released checkpoints, for planning memory and for benchmarks on random weights."""

from __future__ import annotations

import torch

from herald.models.config import ModelConfig


def _sdar(num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        family="sdar",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=32768,
        # of the smaller two the larger variant, so that planned memory is enough for either
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        block_length=4,
        mask_token_id=151669,
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
        pad_token_id=151643,
        dtype=torch.bfloat16,
    )


PRESETS: dict[str, ModelConfig] = {
    "sdar-1.7b": _sdar(28, 2048, 6144, 16),
    "sdar-4b": _sdar(36, 2560, 9728, 32),
    "sdar-8b": _sdar(36, 4096, 12288, 32),
}

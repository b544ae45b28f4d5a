"""Shapes of released checkpoints, for planning memory and for benchmarks on random weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from herald.config import check
from herald.models.config import ModelConfig
from herald.models.moe_config import MoeConfig
from herald.models.noise_config import NoiseConfig, WindowLayers, default_layer_types
from herald.models.rope import RopeScaling, read_rope


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


SDAR_30B_A3B = replace(
    _sdar(48, 2048, 6144, 32),
    family="sdar_moe",
    num_kv_heads=4,
    moe=MoeConfig(score="softmax", num_experts=128, experts_per_token=8, intermediate_size=768),
)

LLADA2_MINI = ModelConfig(
    family="llada2_moe",
    num_layers=20,
    hidden_size=2048,
    intermediate_size=5120,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=157184,
    rms_norm_eps=1e-6,
    rope_theta=6e5,
    rope_scaling=None,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    block_length=32,
    mask_token_id=156895,
    eos_token_ids=(156892,),
    bos_token_id=None,
    pad_token_id=156892,
    dtype=torch.bfloat16,
    partial_rotary_factor=0.5,
    moe=MoeConfig(
        score="sigmoid",
        num_experts=256,
        experts_per_token=8,
        intermediate_size=512,
        num_shared_experts=1,
        first_dense_layers=1,
        num_groups=8,
        top_groups=4,
        scale=2.5,
    ),
)

LLADA_8B = ModelConfig(
    family="llada",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=126464,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    qk_norm=False,
    attention_bias=False,
    block_length=32,
    mask_token_id=126336,
    eos_token_ids=(126081,),
    bos_token_id=None,
    pad_token_id=126081,
    dtype=torch.bfloat16,
    full_attention=True,
)

LLADA_MOE = replace(
    LLADA_8B,
    family="llada_moe",
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=157184,
    rope_theta=5e4,
    max_position_embeddings=8192,
    qk_norm=True,
    mask_token_id=156895,
    eos_token_ids=(156892,),
    pad_token_id=156892,
    moe=MoeConfig(
        score="softmax", num_experts=64, experts_per_token=8, intermediate_size=1024, normalise=False
    ),
)

DREAM_7B = replace(
    LLADA_8B,
    family="dream",
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    vocab_size=152064,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=131072,
    block_length=0,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    bos_token_id=151643,
    pad_token_id=151643,
    shifted=True,
)


def _fast_dllm_v2(
    hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, vocab_size: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        family="fast_dllm_v2",
        num_layers=28,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        qk_norm=False,
        attention_bias=False,
        block_length=32,
        mask_token_id=151665,
        eos_token_ids=(151645,),
        bos_token_id=151643,
        pad_token_id=151643,
        dtype=torch.bfloat16,
        shifted=True,
    )


_GEMMA_LAYERS = default_layer_types(30)
DIFFUSION_GEMMA = ModelConfig(
    family="diffusion_gemma",
    num_layers=30,
    hidden_size=2816,
    intermediate_size=2112,
    num_heads=16,
    num_kv_heads=2,
    head_dim=512,
    vocab_size=262144,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=RopeScaling("proportional", 1.0, 262144, share=0.25),
    max_position_embeddings=262144,
    tie_word_embeddings=True,
    qk_norm=True,
    attention_bias=False,
    block_length=256,
    mask_token_id=0,
    eos_token_ids=(1, 106, 50),
    bos_token_id=2,
    pad_token_id=0,
    dtype=torch.bfloat16,
    moe=MoeConfig(
        score="softmax",
        num_experts=128,
        experts_per_token=8,
        intermediate_size=704,
        activation="gelu_tanh",
    ),
    noise=NoiseConfig(),
    windowed=WindowLayers(
        layers=tuple(i for i, kind in enumerate(_GEMMA_LAYERS) if kind == "sliding_attention"),
        window=1023,
        num_kv_heads=8,
        head_dim=256,
        rope_theta=1e4,
    ),
    softcap=30.0,
    media_token_ids=(258880,),
)

PRESETS: dict[str, ModelConfig] = {
    "sdar-1.7b": _sdar(28, 2048, 6144, 16),
    "sdar-4b": _sdar(36, 2560, 9728, 32),
    "sdar-8b": _sdar(36, 4096, 12288, 32),
    "sdar-30b-a3b": SDAR_30B_A3B,
    "llada2-mini": LLADA2_MINI,
    "diffusiongemma-26b-a4b": DIFFUSION_GEMMA,
    "fast-dllm-v2-1.5b": _fast_dllm_v2(1536, 8960, 12, 2, 151936, tied=True),
    "fast-dllm-v2-7b": _fast_dllm_v2(3584, 18944, 28, 4, 152064, tied=False),
    "llada-8b": LLADA_8B,
    "llada-moe": LLADA_MOE,
    "dream-7b": DREAM_7B,
}


def preset(
    name: str, block_length: int = 0, mask_token_id: int | None = None, rope_scaling: str = ""
) -> ModelConfig:
    """A preset with what `herald.models.read_config` would take in place of the checkpoint's own.

    Raises:
        KeyError: there is no such preset.
        InvalidOption: a value is out of range.
    """
    config = PRESETS[name]
    if config.noise is not None:
        check(
            mask_token_id is None, "mask_token_id", mask_token_id, f"leave it out: {name} has no mask token"
        )
        check(
            not rope_scaling, "rope_scaling", rope_scaling, f"leave it out: {name} is made for its positions"
        )
    if rope_scaling:
        raw = {"rope_theta": config.rope_theta}
        config = replace(config, rope_scaling=read_rope(raw, config.max_position_embeddings, rope_scaling)[1])
    mask = config.mask_token_id if mask_token_id is None else mask_token_id
    return replace(config, block_length=block_length or config.block_length, mask_token_id=mask)

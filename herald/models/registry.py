"""Model families by the ``architectures`` that a ``config.json`` names.

A family is one module of this package and one entry here. Nothing heavy is imported: the entry names
its class, which is imported when a model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from herald.errors import UnknownArchitecture
from herald.models.moe_config import Activation, Score

if TYPE_CHECKING:
    from herald.models.base import BlockModel


# What can be verified of a family, and how. Whoever names one of them in a record has the tests that show it.
CHECKS = {
    "logits": "logits of the published code, float32, within 2e-4",
    "tokens": "tokens of the published decoding, exactly",
    "offload": "the same tokens through the host pool at budget 1.0",
    "gpu": "the same tokens on a CUDA device",
    "released": "released weights answer as with the published code",
}


@dataclass(frozen=True)
class Family:
    """What is known of a family before its weights are read.

    Attributes:
        name: value of `ModelConfig.family`.
        architectures: the names in ``config.json`` that mean this family.
        model: ``"module:class"`` of its `BlockModel`.
        block_length_keys: keys of ``config.json`` that may hold the block length, first one wins.
        block_length: block length of released checkpoints whose configuration is silent; 0 for the whole
            canvas, with ``full_attention``.
        mask_token_id: mask token of released checkpoints whose configuration is silent; None for a family
            without one, which denoises a canvas of random tokens.
        qk_norm: whether queries and keys pass an RMSNorm for each head.
        eos_token_ids: end tokens of released checkpoints that name none.
        router: score of its experts' router, None for a dense family.
        activation: of the gate of its MLPs.
        policy: how its authors decode, a name in `herald.decode.policy`.
        shifted: row i - 1 of the logits predicts position i, as in the autoregressive model it was made from;
            a block's first token comes from the last row before it.
        text_config: key of the object that describes the text model, None where ``config.json`` itself does.
        fixed: keys of ``config.json`` that must have this value where they have one; no other is built.
        full_attention: every position sees every position, later ones too.
        renamed: (usual key, key of this family) of ``config.json``.
        title: as its authors write it.
        paper: arXiv id.
        hub_ids: released checkpoints.
        golden: folders of ``tests/golden`` with its expected results.
        verified: keys of `CHECKS`.
    """

    name: str
    architectures: tuple[str, ...]
    model: str
    block_length_keys: tuple[str, ...]
    block_length: int
    mask_token_id: int | None
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    router: Score | None = None
    activation: Activation = "silu"
    policy: str = "quota"
    shifted: bool = False
    text_config: str | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    full_attention: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    title: str = ""
    paper: str = ""
    hub_ids: tuple[str, ...] = ()
    golden: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()

    def model_class(self) -> type[BlockModel]:
        module, _, name = self.model.partition(":")
        return getattr(importlib.import_module(module), name)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="sdar",
        architectures=("SDARForCausalLM",),
        model="herald.models.sdar:SdarModel",
        block_length_keys=("block_size", "block_length"),
        block_length=4,
        mask_token_id=151669,
        qk_norm=True,
        title="SDAR",
        paper="2510.06303",
        hub_ids=(
            "JetLM/SDAR-1.7B-Chat",
            "JetLM/SDAR-1.7B-Chat-b32",
            "JetLM/SDAR-4B-Chat",
            "JetLM/SDAR-8B-Chat",
            "JetLM/SDAR-8B-Chat-b32",
        ),
        golden=("sdar_b4", "sdar_b8"),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="sdar_moe",
        architectures=("SDARMoeForCausalLM",),
        model="herald.models.sdar_moe:SdarMoeModel",
        block_length_keys=("block_size", "block_length"),
        block_length=4,
        mask_token_id=151669,
        qk_norm=True,
        router="softmax",
        fixed=(("decoder_sparse_step", 1), ("mlp_only_layers", [])),
        title="SDAR-MoE",
        paper="2510.06303",
        hub_ids=("JetLM/SDAR-30B-A3B-Chat",),
        golden=("sdar_moe",),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="llada2_moe",
        architectures=("LLaDA2MoeModelLM",),
        model="herald.models.llada2_moe:Llada2MoeModel",
        block_length_keys=("block_size", "block_length"),
        block_length=32,
        mask_token_id=156895,
        qk_norm=True,
        eos_token_ids=(156892,),
        router="sigmoid",
        policy="llada2",
        fixed=(
            ("use_qk_norm", True),
            ("use_qkv_bias", False),
            ("use_bias", False),
            ("norm_head", False),
            ("use_rmsnorm", True),
            ("using_split_qkv_in_self_attention", False),
            ("score_function", "sigmoid"),
            ("moe_router_enable_expert_bias", True),
        ),
        title="LLaDA2.0, LLaDA2.1",
        paper="2512.15745",
        hub_ids=(
            "inclusionAI/LLaDA2.0-mini",
            "inclusionAI/LLaDA2.0-flash",
            "inclusionAI/LLaDA2.1-mini",
            "inclusionAI/LLaDA2.1-flash",
        ),
        golden=("llada2_moe", "llada21_moe", "llada21_moe_mask_top"),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="fast_dllm_v2",
        architectures=("Fast_dLLM_QwenForCausalLM",),
        model="herald.models.fast_dllm_v2:FastDllmV2Model",
        block_length_keys=("bd_size", "block_size", "block_length"),
        block_length=32,
        mask_token_id=151665,
        qk_norm=False,
        eos_token_ids=(151645,),
        policy="fast_dllm_v2",
        shifted=True,
        title="Fast-dLLM v2",
        paper="2509.26328",
        hub_ids=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
        golden=("fast_dllm_v2", "fast_dllm_v2_bd8_tied"),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="llada",
        architectures=("LLaDAModelLM",),
        model="herald.models.llada:LladaModel",
        block_length_keys=("block_length",),
        block_length=32,
        mask_token_id=126336,
        qk_norm=False,
        policy="llada",
        full_attention=True,
        renamed=(
            ("hidden_size", "d_model"),
            ("intermediate_size", "mlp_hidden_size"),
            ("num_hidden_layers", "n_layers"),
            ("num_attention_heads", "n_heads"),
            ("num_key_value_heads", "n_kv_heads"),
            ("max_position_embeddings", "max_sequence_length"),
            ("vocab_size", "embedding_size"),  # the table's rows; the tokenizer may have fewer
            ("hidden_act", "activation_type"),
            ("tie_word_embeddings", "weight_tying"),
        ),
        fixed=(
            ("block_type", "llama"),
            ("block_group_size", 1),
            ("layer_norm_type", "rms"),
            ("rope", True),
            ("alibi", False),
            ("attention_layer_norm", False),
            ("bias_for_layer_norm", False),
            ("include_bias", False),
            ("include_qkv_bias", False),
            ("input_emb_norm", False),
            ("multi_query_attention", False),
            ("scale_logits", False),
        ),
        title="LLaDA, LLaDA-1.5",
        paper="2502.09992",
        hub_ids=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
        golden=("llada",),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="llada_moe",
        architectures=("LLaDAMoEModelLM",),
        model="herald.models.llada_moe:LladaMoeModel",
        block_length_keys=("block_length",),
        block_length=32,
        mask_token_id=156895,
        qk_norm=True,
        eos_token_ids=(156892,),
        router="softmax",
        policy="llada",
        full_attention=True,
        renamed=(
            ("intermediate_size", "dense_intermediate_size"),
            ("moe_intermediate_size", "expert_intermediate_size"),
        ),
        fixed=(
            ("qk_layernorm", True),
            ("attention_bias", False),
            ("moe_router_score_function", "softmax"),
            ("moe_router_enable_expert_bias", False),
            ("routed_scaling_factor", 1),
            ("shared_expert_intermediate_size", 0),
            ("clip_qkv", None),
        ),
        title="LLaDA-MoE",
        paper="2509.24389",
        hub_ids=("inclusionAI/LLaDA-MoE-7B-A1B-Base", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
        golden=("llada_moe",),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="dream",
        architectures=("DreamModel",),
        model="herald.models.dream:DreamModel",
        block_length_keys=("block_length",),
        block_length=0,
        mask_token_id=151666,
        qk_norm=False,
        policy="dream",
        full_attention=True,
        shifted=True,
        fixed=(("use_mrope", False),),
        title="Dream",
        paper="2508.15487",
        hub_ids=("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"),
        golden=("dream",),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
    Family(
        name="diffusion_gemma",
        architectures=("DiffusionGemmaForBlockDiffusion",),
        model="herald.models.diffusion_gemma:DiffusionGemmaModel",
        block_length_keys=("canvas_length",),
        block_length=256,
        mask_token_id=None,
        qk_norm=True,
        eos_token_ids=(1, 106),
        router="softmax",
        activation="gelu_tanh",
        policy="entropy_bound",
        text_config="text_config",
        fixed=(
            ("attention_bias", False),
            ("tie_word_embeddings", True),
            ("hidden_activation", "gelu_pytorch_tanh"),
            ("use_bidirectional_attention", "vision"),
        ),
        title="DiffusionGemma",
        paper="2505.24857",  # of its sampler; the model has none
        hub_ids=("google/diffusiongemma-26B-A4B-it",),
        golden=("diffusion_gemma",),
        verified=("logits", "tokens", "offload", "gpu"),
    ),
)


def known_architectures() -> list[str]:
    return sorted(name for family in FAMILIES for name in family.architectures)


def family_named(name: str) -> Family:
    """The family whose `Family.name` is ``name``. Raises KeyError."""
    return {family.name: family for family in FAMILIES}[name]


def find_family(architectures: Sequence[str]) -> Family:
    """The family that reads the first known name of ``architectures``.

    Raises:
        UnknownArchitecture: none is known; lists those that are.
    """
    for wanted in architectures:
        for family in FAMILIES:
            if wanted in family.architectures:
                return family
    named = ", ".join(architectures) or "none at all"
    raise UnknownArchitecture(
        f"config.json names the architecture {named}, which no family reads",
        f"use a checkpoint of one of: {', '.join(known_architectures())}",
    )

"""Reading the configuration of families with experts: released values, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from herald.errors import HeraldError, InvalidOption, WeightsError
from herald.models import num_parameters, read_config
from herald.models.moe_config import MoeConfig
from herald.models.presets import PRESETS

SHARED = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
RELEASED: dict[str, dict[str, Any]] = {
    "llada2-mini": SHARED
    | {
        "architectures": ["LLaDA2MoeModelLM"],
        "first_k_dense_replace": 1,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "moe_router_enable_expert_bias": True,
        "n_group": 8,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_hidden_layers": 20,
        "num_shared_experts": 1,
        "pad_token_id": 156892,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_group": 4,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "vocab_size": 157184,
    },
    "sdar-30b-a3b": SHARED
    | {
        "architectures": ["SDARMoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_hidden_layers": 48,
        "rope_theta": 1000000,
        "vocab_size": 151936,
    },
}
ABSENT = object()


def write(folder: Path, name: str, **changes: Any) -> Path:
    raw = {key: value for key, value in (RELEASED[name] | changes).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("name", RELEASED)
def test_presets_are_what_released_checkpoints_say(tmp_path: Path, name: str) -> None:
    found, preset = read_config(write(tmp_path, name)), PRESETS[name]
    for field in vars(preset):
        if field not in ("eos_token_ids", "pad_token_id"):
            assert getattr(found, field) == getattr(preset, field), field
    assert set(found.eos_token_ids) <= set(preset.eos_token_ids)


def test_half_of_each_head_is_rotated(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "llada2-mini")).rotary_dim == 64
    assert read_config(write(tmp_path, "sdar-30b-a3b")).rotary_dim == 128


def test_softmax_routers_have_no_groups(tmp_path: Path) -> None:
    moe = read_config(write(tmp_path, "sdar-30b-a3b", n_group=4, routed_scaling_factor=9.0)).moe
    assert moe is not None and (moe.num_groups, moe.scale) == (1, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "names"),
    [
        ("llada2-mini", {"num_experts": ABSENT}, WeightsError, "num_experts=None"),
        ("llada2-mini", {"n_group": ABSENT}, WeightsError, "n_group=None"),
        ("llada2-mini", {"routed_scaling_factor": "x"}, WeightsError, "routed_scaling_factor='x'"),
        ("llada2-mini", {"num_experts": 5000, "n_group": 1}, InvalidOption, "num_experts=5000"),
        ("llada2-mini", {"num_experts_per_tok": 0}, InvalidOption, "experts_per_token=0"),
        ("llada2-mini", {"num_experts_per_tok": 300}, InvalidOption, "experts_per_token=300"),
        ("llada2-mini", {"moe_intermediate_size": 0}, InvalidOption, "moe_intermediate_size=0"),
        ("llada2-mini", {"num_shared_experts": -1}, InvalidOption, "num_shared_experts=-1"),
        ("llada2-mini", {"first_k_dense_replace": -1}, InvalidOption, "first_dense_layers=-1"),
        ("llada2-mini", {"n_group": 7}, InvalidOption, "num_groups=7"),
        ("llada2-mini", {"n_group": 256}, InvalidOption, "num_groups=256"),
        ("llada2-mini", {"topk_group": 9}, InvalidOption, "top_groups=9"),
        ("llada2-mini", {"n_group": 128, "topk_group": 3}, InvalidOption, "top_groups=3.*8 experts"),
        ("llada2-mini", {"use_qk_norm": False}, InvalidOption, "use_qk_norm=False"),
        ("llada2-mini", {"use_qkv_bias": True}, InvalidOption, "use_qkv_bias=True"),
        ("llada2-mini", {"score_function": "softmax"}, InvalidOption, "score_function='softmax'"),
        ("llada2-mini", {"partial_rotary_factor": 0.0}, InvalidOption, "partial_rotary_factor=0.0"),
        ("llada2-mini", {"partial_rotary_factor": 1.5}, InvalidOption, "partial_rotary_factor=1.5"),
        ("llada2-mini", {"partial_rotary_factor": 0.008}, InvalidOption, "partial_rotary_factor=0.008"),
        ("sdar-30b-a3b", {"decoder_sparse_step": 2}, InvalidOption, "decoder_sparse_step=2"),
        ("sdar-30b-a3b", {"mlp_only_layers": [0]}, InvalidOption, r"mlp_only_layers=\[0\]"),
    ],
)
def test_refusals_name_the_field(
    tmp_path: Path, name: str, changes: dict[str, Any], kind: type[HeraldError], names: str
) -> None:
    with pytest.raises(kind, match=names) as caught:
        read_config(write(tmp_path, name, **changes))
    assert caught.value.remedy


WRONG = ["abc", -1, 0, 1.5, True, [], ["a"], [[]], {}, 10**12, 1e400]


@pytest.mark.parametrize(
    "field",
    [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "num_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "partial_rotary_factor",
    ],
)
def test_any_value_is_read_or_refused_with_a_remedy(tmp_path: Path, field: str) -> None:
    refused = 0
    for value in WRONG:
        try:
            num_parameters(read_config(write(tmp_path, "llada2-mini", num_hidden_layers=2, **{field: value})))
        except HeraldError as error:
            assert error.remedy and "\n" not in str(error)
            refused += 1
    assert refused >= 4


def test_fields_are_checked_on_construction() -> None:
    with pytest.raises(InvalidOption, match="experts_per_token=5"):
        MoeConfig(score="softmax", num_experts=4, experts_per_token=5, intermediate_size=8)

"""Reading config.json: released defaults, overrides, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from herald.errors import HeraldError, InvalidOption, ModelNotFound, UnknownArchitecture, WeightsError
from herald.models import PRESETS, known_architectures, num_parameters, read_config
from herald.models.loader import num_active_parameters
from herald.models.registry import FAMILIES

RELEASED: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "model_type": "sdar",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
ABSENT = object()


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    raw = {key: value for key, value in (RELEASED | changes).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_released_checkpoint_gets_the_family_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert (config.block_length, config.mask_token_id) == (4, 151669)
    assert config.family == "sdar" and config.qk_norm
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (28, 16, 8, 128)
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (151643,)
    assert config.max_positions == 32768 and config.rope_scaling is None and config.rope_theta == 1e6


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"eos_token_id": [151645, 151643], "pad_token_id": 151643}))
    assert config.eos_token_ids == (151645, 151643)
    assert config.pad_token_id == 151643


def test_silent_generation_config_leaves_the_config(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, {"eos_token_id": None, "top_k": 20})).eos_token_ids == (151643,)


@pytest.mark.parametrize("key", ["block_size", "block_length"])
def test_config_names_block_and_mask(tmp_path: Path, key: str) -> None:
    config = read_config(write(tmp_path, **{key: 32}, mask_token_id=7))
    assert (config.block_length, config.mask_token_id) == (32, 7)


def test_options_override_the_config(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, block_size=32, mask_token_id=7), block_length=8, mask_token_id=0)
    assert (config.block_length, config.mask_token_id) == (8, 0)


def test_dtype_and_rope_of_the_newer_layout(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    folder = write(tmp_path, rope_theta=ABSENT, torch_dtype=ABSENT, dtype="float16", rope_parameters=rope)
    config = read_config(folder)
    assert config.rope_theta == 5e5 and config.dtype == torch.float16


def test_head_dim_and_kv_heads_may_be_implied(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, head_dim=ABSENT, num_key_value_heads=ABSENT))
    assert config.head_dim == 2048 // 16 and config.num_kv_heads == 16


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_scaling_extends_the_positions(tmp_path: Path, kind: str, key: str) -> None:
    scaling = {key: kind, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read_config(write(tmp_path, rope_scaling=scaling))
    assert config.rope_scaling is not None and config.rope_scaling.kind == kind
    assert config.max_positions == 131072


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="SDARForCausalLM") as caught:
        read_config(write(tmp_path, architectures=["LlamaForCausalLM"]))
    assert "LlamaForCausalLM" in caught.value.problem
    assert all(name in caught.value.remedy for name in known_architectures())


@pytest.mark.parametrize(
    ("changes", "kind", "names"),
    [
        ({"hidden_size": ABSENT}, WeightsError, "hidden_size"),
        ({"num_hidden_layers": "many"}, WeightsError, "num_hidden_layers='many'"),
        ({"num_attention_heads": True}, WeightsError, "num_attention_heads=True"),
        ({"rope_theta": ABSENT}, WeightsError, "rope_theta"),
        ({"architectures": ABSENT}, UnknownArchitecture, "none at all"),
        ({"vocab_size": 0}, InvalidOption, "vocab_size=0"),
        ({"num_key_value_heads": 3}, InvalidOption, "num_kv_heads=3"),
        ({"head_dim": 127}, InvalidOption, "head_dim=127"),
        ({"vocab_size": 1000}, InvalidOption, "mask_token_id=151669"),
        ({"hidden_act": "gelu"}, InvalidOption, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, InvalidOption, "sliding_window=4096"),
        ({"quantization_config": {"bits": 4}}, InvalidOption, "quantization_config"),
        ({"torch_dtype": "float8"}, InvalidOption, "dtype='float8'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, InvalidOption, "'dynamic'.*'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, InvalidOption, "factor=-1"),
    ],
)
def test_refusals_name_the_field(
    tmp_path: Path, changes: dict[str, Any], kind: type[HeraldError], names: str
) -> None:
    with pytest.raises(kind, match=names) as caught:
        read_config(write(tmp_path, **changes))
    assert caught.value.remedy


FIELDS = [*RELEASED, "rope_parameters", "block_size", "mask_token_id", "dtype"]
IGNORED = [
    "model_type",
    "use_sliding_window",
    "bos_token_id",
    "sliding_window",
    "tie_word_embeddings",
    "attention_bias",
]
WRONG = ["abc", -1, 0, 1.5, True, [], ["a"], [1, 2], [[]], {}, {"a": 1}, 10**12, 1e400]


@pytest.mark.parametrize("field", sorted(set(FIELDS) - set(IGNORED)))
def test_any_value_is_read_or_refused_with_a_remedy(tmp_path: Path, field: str) -> None:
    refused = 0
    for value in WRONG:
        try:
            num_parameters(read_config(write(tmp_path, **{field: value})))
        except HeraldError as error:
            assert error.remedy and "\n" not in str(error)
            refused += 1
    assert refused >= 4


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"type": "linear", "factor": "x"}, "factor='x' is not a finite number"),
        ({"type": "linear", "factor": 0}, r"factor=0\.0"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}, "'x' is not an integer"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": -5}, "=-5"),
        ({"type": "yarn", "factor": 2, "beta_fast": -1}, r"beta_fast=-1\.0"),
        ({"type": "yarn", "factor": 2, "mscale": "x", "mscale_all_dim": 1}, "mscale='x'"),
        ({"type": "yarn", "factor": 2, "attention_factor": [1]}, r"attention_factor=\[1\]"),
        ({"type": "yarn", "factor": 2, "rope_theta": 1}, r"rope_theta=1\.0"),
        ({"type": ["x"]}, r"type \['x'\]"),
    ],
)
def test_wrong_rope_scaling_names_its_field(tmp_path: Path, table: dict[str, Any], names: str) -> None:
    with pytest.raises(HeraldError, match=names):
        read_config(write(tmp_path, rope_scaling=table))


@pytest.mark.parametrize("value", [1.5, "abc", True, ["a"], [1, 2.5], {}])
def test_end_tokens_are_token_ids(tmp_path: Path, value: object) -> None:
    with pytest.raises(WeightsError, match=r"eos_token_id=.* is not a token id"):
        read_config(write(tmp_path, generation={"eos_token_id": value}))


@pytest.mark.parametrize(
    "option", [{"block_length": 8.0}, {"block_length": None}, {"mask_token_id": 1.5}, {"mask_token_id": True}]
)
def test_overrides_are_whole_numbers(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(option))):
        read_config(write(tmp_path), **option)


@pytest.mark.parametrize("block_length", [-1, 40000])
def test_impossible_block_length(tmp_path: Path, block_length: int) -> None:
    with pytest.raises(InvalidOption, match=f"block_length={block_length}"):
        read_config(write(tmp_path), block_length=block_length)


def test_impossible_mask_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="mask_token_id=151936"):
        read_config(write(tmp_path), mask_token_id=151936)


def test_absent_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"architectures": [', b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_unreadable_json_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=name):
        read_config(tmp_path)


def test_every_family_names_a_model_class() -> None:
    for family in FAMILIES:
        assert family.model_class().__name__ == family.model.partition(":")[2]


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("sdar-1.7b", 2.03, 2.03),
        ("sdar-4b", 4.41, 4.41),
        ("sdar-8b", 8.19, 8.19),
        ("sdar-30b-a3b", 30.53, 3.35),
        ("llada2-mini", 16.26, 1.43),
        ("llada-8b", 8.02, 8.02),
        ("llada-moe", 7.36, 1.72),
        ("dream-7b", 7.62, 7.62),
        ("diffusiongemma-26b-a4b", 25.25, 3.84),
    ],
)
def test_presets_have_the_published_size(name: str, billions: float, active: float) -> None:
    assert num_parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, abs=0.01)
    assert num_active_parameters(PRESETS[name]) / 1e9 == pytest.approx(active, abs=0.01)

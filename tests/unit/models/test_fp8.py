"""Checkpoints with e4m3 weights: what is read, to which numbers, and every misfit by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from herald.errors import InvalidOption, WeightsError
from herald.models import load_model
from herald.models.fp8 import Fp8Layout, dequantise, read_fp8
from herald.models.sdar import SdarModel
from tests.support.golden import GOLDEN

SOURCE = GOLDEN / "sdar_b4"
E4M3_MAX = 448.0
BLOCK = (32, 16)
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}
Tensors = dict[str, torch.Tensor]


def quantised(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 numbers, scales, what they stand for in float64), computed block by block."""
    rows, columns = weight.shape
    high, wide = {"tensor": (rows, columns), "row": (1, columns), "block": BLOCK}[kind]
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(weight, dtype=torch.float64)
    scales = torch.empty(math.ceil(rows / high), math.ceil(columns / wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[at].abs().max() / E4M3_MAX
            numbers[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = numbers[at].double() * scales[i, j].double()
    return numbers, scales.reshape(()) if kind == "tensor" else scales, meant


def write(folder: Path, kind: str, described: dict[str, Any], shards: int = 1) -> Tensors:
    """An fp8 checkpoint of the golden model; returns what its weights stand for."""
    stored, meant = {}, {}
    for name, tensor in load_file(SOURCE / "model.safetensors").items():
        if "proj" not in name:
            stored[name], meant[name] = tensor.bfloat16(), tensor.bfloat16().double()
            continue
        suffix = "_scale_inv" if kind == "block" else "_scale"
        stored[name], stored[name + suffix], meant[name] = quantised(tensor, kind)
        if kind == "tensor":
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        save_file({name: stored[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    raw = json.loads((SOURCE / "config.json").read_text())
    raw |= {"torch_dtype": "bfloat16", "quantization_config": described}
    (folder / "config.json").write_text(json.dumps(raw))
    return meant


def load(folder: Path, dtype: torch.dtype | None = None) -> SdarModel:
    model = load_model(folder, dtype=dtype)
    assert isinstance(model, SdarModel)
    return model


KINDS = [("block", BLOCKS), ("tensor", TENSORS), ("row", COMPRESSED)]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("kind", "described"), KINDS, ids=["block", "tensor", "row"])
def test_weights_are_what_their_scales_make_of_them(
    tmp_path: Path, kind: str, described: dict[str, Any], shards: int
) -> None:
    """Scales may lie in another shard than their weight, and joined tensors keep their own."""
    meant = write(tmp_path, kind, described, shards)
    exact, usual = load(tmp_path, torch.float32), load(tmp_path)
    assert usual.dtype == torch.bfloat16
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        parts = {
            "qkv": [f"self_attn.{part}_proj.weight" for part in "qkv"],
            "output": ["self_attn.o_proj.weight"],
            "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "down": ["mlp.down_proj.weight"],
        }
        for field, names in parts.items():
            expected = torch.cat([meant[prefix + name] for name in names])
            found = getattr(exact.layers[layer], field)
            assert torch.allclose(found.double(), expected, rtol=1e-6, atol=0)
            assert torch.equal(getattr(usual.layers[layer], field), found.bfloat16())
    assert torch.equal(exact.embedding.double(), meant["model.embed_tokens.weight"])


def test_logits_stay_near_those_of_the_full_weights(tmp_path: Path) -> None:
    write(tmp_path, "block", BLOCKS)
    ids = torch.arange(40)
    expected, found = load(SOURCE).dense_logits(ids), load(tmp_path, torch.float32).dense_logits(ids)
    assert (found - expected).abs().mean() < 0.2 * expected.std()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("chunk", [1, 4 * 200 * 128, 1 << 20])
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 200), (129, 1)])
def test_any_chunk_gives_the_same(shape: tuple[int, int], chunk: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128))
    place = torch.full(shape, float("nan"))
    dequantise(weight, scale, Fp8Layout(), place, chunk)
    for i in range(shape[0]):
        expected = weight[i].float() * scale[i // 128].repeat_interleave(128)[: shape[1]]
        assert torch.equal(place[i], expected)


def drop_scale(tensors: Tensors) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def cut_scale(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][:-1].clone()


def add_scale(tensors: Tensors) -> None:
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)


def narrow_scale(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_scale, r"up_proj\.weight \[80, 48\] \(no .*weight_scale_inv or .*weight_scale\)"),
        (cut_scale, r"up_proj\.weight_scale_inv F32 \[2, 3\], blocks of 32 x 16"),
        (narrow_scale, r"up_proj\.weight_scale_inv F8_E4M3 \[3, 3\]"),
        (add_scale, r"unexpected: model\.norm\.weight_scale_inv"),
    ],
)
def test_misfits_are_named(tmp_path: Path, damage: Callable[[Tensors], None], message: str) -> None:
    write(tmp_path, "block", BLOCKS)
    file = tmp_path / "model-0.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_fp8_that_config_json_does_not_announce(tmp_path: Path) -> None:
    write(tmp_path, "block", BLOCKS)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(WeightsError, match=r"not of a type in F32, F16, BF16: .*F8_E4M3"):
        load(tmp_path)


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}},
        },
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
    ],
    ids=str,
)
def test_other_quantisations_are_refused(described: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        read_fp8({"quantization_config": described})


def test_released_descriptions() -> None:
    assert read_fp8({}) is None and read_fp8({"quantization_config": None}) is None
    released = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert read_fp8({"quantization_config": released}) == Fp8Layout((128, 128))
    assert read_fp8({"quantization_config": TENSORS}) == Fp8Layout()
    assert read_fp8({"quantization_config": COMPRESSED}) == Fp8Layout()


@pytest.mark.gpu
def test_dequantised_on_cuda(tmp_path: Path) -> None:
    write(tmp_path, "block", BLOCKS)
    found = load_model(tmp_path, "cuda", torch.bfloat16)
    assert isinstance(found, SdarModel)
    expected = load(tmp_path, torch.bfloat16)
    assert torch.equal(found.layers[1].gate_up.cpu(), expected.layers[1].gate_up)

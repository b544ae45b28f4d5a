"""Loading checkpoints: shards, tying, biases, dtypes, and every kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from herald.errors import HeraldError, WeightsError
from herald.models import load_model
from herald.models.sdar import SdarModel
from tests.support.golden import GOLDEN

SOURCE = GOLDEN / "sdar_b4"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def stored() -> Tensors:
    return load_file(SOURCE / "model.safetensors")


def write(folder: Path, tensors: Tensors, **config: object) -> Path:
    raw = json.loads((SOURCE / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: Tensors, count: int) -> dict[str, str]:
    shutil.copy(SOURCE / "config.json", folder)
    # dealt out in turn, so that the parts of a joined tensor lie in different files
    names = {
        name: f"model-{index % count + 1:05d}-of-{count:05d}.safetensors"
        for index, name in enumerate(sorted(tensors))
    }
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return names


def load(folder: Path, dtype: torch.dtype | None = None) -> SdarModel:
    model = load_model(folder, dtype=dtype)
    assert isinstance(model, SdarModel)
    return model


def test_parts_are_joined_in_order(stored: Tensors) -> None:
    model = load(SOURCE)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(model.layers[1].qkv, torch.cat([stored[name] for name in names]))
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(model.layers[1].gate_up, torch.cat([stored[name] for name in names]))
    assert model.weight_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path, stored: Tensors) -> None:
    write_shards(tmp_path, stored, 3)
    ids = torch.arange(20)
    assert torch.equal(load(tmp_path).dense_logits(ids), load(SOURCE).dense_logits(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_conversion_on_load(stored: Tensors, dtype: torch.dtype) -> None:
    model = load(SOURCE, dtype)
    assert model.dtype == model.layers[0].down.dtype == dtype
    assert torch.equal(model.embedding, stored["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(model.layers[0].qkv[:64], stored["model.layers.0.self_attn.q_proj.weight"].to(dtype))


def test_dtype_of_the_checkpoint_by_default(tmp_path: Path, stored: Tensors) -> None:
    narrow = {name: tensor.bfloat16() for name, tensor in stored.items()}
    model = load(write(tmp_path, narrow, torch_dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.final_norm, narrow["model.norm.weight"])


@pytest.mark.parametrize("head_stored", [False, True])
def test_tied_embeddings(tmp_path: Path, stored: Tensors, head_stored: bool) -> None:
    if not head_stored:
        del stored["lm_head.weight"]
    model = load(write(tmp_path, stored, tie_word_embeddings=True))
    assert model.head is model.embedding
    assert model.weight_bytes == sum(t.nbytes for name, t in stored.items() if name != "lm_head.weight")


def test_attention_biases(tmp_path: Path, stored: Tensors) -> None:
    plain = load(SOURCE)
    for layer in range(2):
        for part, size in (("q", 64), ("k", 32), ("v", 32), ("o", 48)):
            stored[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.full((size,), float(ord(part)))
    biased = load(write(tmp_path, stored, attention_bias=True))
    hidden, attention = torch.randn(3, 48), torch.randn(3, 64)
    added = biased.qkv(0, hidden) - plain.qkv(0, hidden)
    expected = torch.tensor([113.0] * 64 + [107.0] * 32 + [118.0] * 32)
    assert torch.allclose(added, expected.expand(3, -1), atol=1e-4)
    bias, biased.layers[0].output_bias = biased.layers[0].output_bias, None
    assert torch.equal(
        biased.finish_layer(0, hidden.clone(), attention), plain.finish_layer(0, hidden.clone(), attention)
    )
    biased.layers[0].output_bias = bias
    assert not torch.allclose(
        biased.finish_layer(0, hidden.clone(), attention), plain.finish_layer(0, hidden.clone(), attention)
    )


def test_rotary_buffers_are_tolerated(tmp_path: Path, stored: Tensors) -> None:
    stored["model.rotary_emb.inv_freq"] = torch.zeros(8)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    ids = torch.arange(8)
    assert torch.equal(load(write(tmp_path, stored)).dense_logits(ids), load(SOURCE).dense_logits(ids))


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(47)


def quantise(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)


def transpose(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"missing: model\.layers\.1\.mlp\.up_proj\.weight;"),
        (add, r"unexpected: model\.layers\.2\.mlp\.up_proj\.weight;"),
        (reshape, r"mis-shaped: model\.norm\.weight \[47\] instead of \[48\]"),
        (transpose, r"mis-shaped: model\.layers\.0\.mlp\.down_proj\.weight \[80, 48\] instead of \[48, 80\]"),
        (quantise, r"not of a type in F32, F16, BF16: model\.norm\.weight I8"),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, stored: Tensors, damage: Callable[[Tensors], None], message: str
) -> None:
    damage(stored)
    with pytest.raises(WeightsError, match=message):
        load(write(tmp_path, stored))


def test_long_lists_are_cut(tmp_path: Path, stored: Tensors) -> None:
    with pytest.raises(WeightsError, match=r"missing: .* and 16 more"):
        load(write(tmp_path, {"model.norm.weight": stored["model.norm.weight"]}))


@pytest.mark.parametrize("keep", [-1, 40, 3])
def test_truncated_file_is_named_with_its_size(tmp_path: Path, stored: Tensors, keep: int) -> None:
    file = write(tmp_path, stored) / "model.safetensors"
    content = file.read_bytes()[:keep]
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"model\.safetensors .*{len(content)} bytes"):
        load(tmp_path)


def test_truncated_file_says_what_was_promised(tmp_path: Path, stored: Tensors) -> None:
    file = write(tmp_path, stored) / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=f"{size - 100} bytes where its header promises {size}"):
        load(tmp_path)


@pytest.mark.parametrize("header", [b"{not json", b"[1, 2, 3]", b'{"a": {"dtype": "F32"}}', b"[" * 100_000])
def test_unreadable_header(tmp_path: Path, stored: Tensors, header: bytes) -> None:
    file = write(tmp_path, stored) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match="unreadable header"):
        load(tmp_path)


@pytest.mark.parametrize("offsets", [[0, 4], [8, 4], [0.5, 4]])
def test_offsets_that_do_not_fit_are_named(tmp_path: Path, stored: Tensors, offsets: list[float]) -> None:
    file = write(tmp_path, stored) / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    next(entry for name, entry in header.items() if name != "__metadata__")["data_offsets"] = offsets
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


def test_a_folder_in_the_place_of_the_weights(tmp_path: Path) -> None:
    shutil.copy(SOURCE / "config.json", tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    shutil.copy(SOURCE / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor") as caught:
        load(tmp_path)
    assert "safetensors" in caught.value.remedy


def test_missing_shard_is_named(tmp_path: Path, stored: Tensors) -> None:
    names = write_shards(tmp_path, stored, 3)
    gone = names["model.norm.weight"]
    (tmp_path / gone).unlink()
    with pytest.raises(WeightsError, match=gone):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "{}", *(f'{{"weight_map": {files}}}' for files in ("[]", '{"a": 1}', '{"a": [1]}', '{"a": "."}'))],
)
def test_unreadable_index(tmp_path: Path, stored: Tensors, content: str) -> None:
    write_shards(tmp_path, stored, 2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(HeraldError, match="index"):
        load(tmp_path)


@pytest.mark.gpu
def test_load_on_cuda_converts_there(stored: Tensors) -> None:
    model = load_model(SOURCE, "cuda", torch.bfloat16)
    assert isinstance(model, SdarModel) and model.device.type == "cuda"
    assert torch.equal(model.head.cpu(), stored["lm_head.weight"].bfloat16())
    assert model.rotary.inverse_frequencies.device.type == "cuda"

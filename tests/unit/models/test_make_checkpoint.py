"""The random checkpoints of the benchmarks load like released ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench_longctx.make_checkpoint import main
from herald.models import PRESETS, load_model, read_config
from herald.models.decoder import DecoderModel
from herald.models.sdar import SdarModel

SHAPE = {
    "layers": 2,
    "hidden": 64,
    "intermediate": 96,
    "heads": 4,
    "kv-heads": 2,
    "head-dim": 16,
    "vocab": 320,
}
SMALL = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]


def make(folder: Path, *extra: str) -> SdarModel:
    assert main([str(folder), *SMALL, "--device", "cpu", *extra]) == 0
    model = load_model(folder)
    assert isinstance(model, SdarModel)
    return model


def test_writes_shards_that_load(tmp_path: Path) -> None:
    model = make(tmp_path, "--block-length", "8", "--shard-gib", "0.00003")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    config = model.config
    assert (config.block_length, config.mask_token_id, config.eos_token_ids) == (8, 319, (318,))
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.layers[1].q_norm, torch.ones(16, dtype=torch.bfloat16))
    assert model.layers[0].down.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert model.dense_logits(torch.arange(20)).isfinite().all()


def test_total_size_counts_the_tensors(tmp_path: Path) -> None:
    make(tmp_path, "--shard-gib", "0.00003")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert all(name in files[file] for name, file in index["weight_map"].items())
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total


def test_seed_and_not_the_cut_decides_the_weights(tmp_path: Path) -> None:
    first = make(tmp_path / "a", "--seed", "3")
    same = make(tmp_path / "b", "--seed", "3", "--shard-gib", "0.00003")
    other = make(tmp_path / "c", "--seed", "4")
    assert torch.equal(first.layers[0].qkv, same.layers[0].qkv)
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)
    assert not torch.equal(first.layers[0].down, first.layers[1].down)


EXPERTS = {
    "layers": 3,
    "experts": 16,
    "experts-per-token": 4,
    "moe-intermediate": 24,
    "groups": 4,
    "top-groups": 2,
}


def test_experts(tmp_path: Path) -> None:
    more = [word for name, value in EXPERTS.items() for word in (f"--{name}", str(value))]
    chosen = [str(tmp_path), *SMALL, "--device", "cpu", "--preset", "llada2-mini", *more]
    assert main([*chosen, "--shard-gib", "0.0001"]) == 0
    model = load_model(tmp_path)
    assert isinstance(model, DecoderModel)
    config, moe = model.config, model.config.moe
    assert (config.family, config.num_layers, config.rotary_dim) == ("llada2_moe", 3, 8)
    assert moe is not None and (moe.num_experts, moe.num_groups, moe.top_groups) == (16, 4, 2)
    assert (moe.first_dense_layers, moe.num_shared_experts, moe.scale) == (1, 1, 2.5)
    experts = model.layers[2].experts
    assert experts is not None and experts.gate_up.shape == (16, 48, 64)
    assert experts.router.dtype == torch.float32 and experts.router.std().item() > 0.01
    assert model.dense_logits(torch.arange(40)).isfinite().all()


@pytest.mark.parametrize("preset", ["llada-8b", "llada-moe", "dream-7b"])
def test_families_with_full_attention(tmp_path: Path, preset: str) -> None:
    more = ["--experts", "8", "--experts-per-token", "2", "--moe-intermediate", "24"]
    chosen = more if preset == "llada-moe" else []
    assert main([str(tmp_path), *SMALL, "--device", "cpu", "--preset", preset, *chosen]) == 0
    model = load_model(tmp_path)
    assert isinstance(model, DecoderModel)
    wanted = PRESETS[preset]
    assert (model.config.family, model.config.block_length) == (wanted.family, wanted.block_length)
    assert model.config.full_attention and model.config.shifted == wanted.shifted
    assert model.config.rms_norm_eps == wanted.rms_norm_eps
    assert model.dense_logits(torch.arange(40)).isfinite().all()


def test_experts_of_a_dense_preset_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new"), *SMALL, "--experts", "4"]) == 2
    assert "sdar-8b has no experts" in capsys.readouterr().out


def test_tied(tmp_path: Path) -> None:
    model = make(tmp_path, "--tied")
    assert model.head is model.embedding


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new"), "--preset", "sdar-8b", "--dry-run"]) == 0
    assert not (tmp_path / "new").exists()
    assert "8.19 G parameters" in capsys.readouterr().out


def test_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    assert main([str(tmp_path), *SMALL]) == 2
    assert "already" in capsys.readouterr().out


def test_impossible_shape_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), *SMALL, "--kv-heads", "3"]) == 2
    assert "num_kv_heads=3" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_released_vocabulary_keeps_its_tokens(tmp_path: Path) -> None:
    assert main([str(tmp_path), *SMALL, "--vocab", "151936", "--hidden", "8", "--device", "cpu"]) == 0
    config = read_config(tmp_path)
    assert config.mask_token_id == 151669 and config.eos_token_ids == (151645, 151643)

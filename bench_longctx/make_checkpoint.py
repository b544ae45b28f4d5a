"""Writes a checkpoint of random weights in the released format: any shape, no download.

    python bench_longctx/make_checkpoint.py /data/sdar-8b --preset sdar-8b
    python bench_longctx/make_checkpoint.py /data/small --layers 4 --hidden 512 --heads 8 --kv-heads 2
    python bench_longctx/make_checkpoint.py /data/moe --preset llada2-mini --layers 3 --experts 16

The folder holds config.json, generation_config.json, bf16 shards (routers in float32) and their index, and
loads like a released one; there is no tokenizer, so prompts are token ids. The same seed gives the same
weights on the same kind of device, however they are cut into shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from herald.errors import InvalidOption, UsageError
from herald.models.config import ModelConfig
from herald.models.moe_config import MoeConfig
from herald.models.presets import PRESETS
from herald.models.registry import family_named
from herald.models.weights import INDEX_FILE, Source

# Of random weights; routers' make logits of about the spread that trained ones have.
WEIGHT_STD = 0.02
DTYPE = torch.bfloat16
# option -> field of ModelConfig
SHAPE_OPTIONS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "block_length": "block_length",
    "mask_token_id": "mask_token_id",
}
# option -> field of MoeConfig, for presets with experts
MOE_OPTIONS = {
    "experts": "num_experts",
    "experts_per_token": "experts_per_token",
    "moe_intermediate": "intermediate_size",
    "shared_experts": "num_shared_experts",
    "dense_layers": "first_dense_layers",
    "groups": "num_groups",
    "top_groups": "top_groups",
}
STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}


def dtype_of(source: Source) -> torch.dtype:
    return source.dtype or DTYPE


def num_bytes(source: Source) -> int:
    return math.prod(source.shape) * dtype_of(source).itemsize


def plan_shards(config: ModelConfig, shard_bytes: int) -> dict[str, list[Source]]:
    """File name -> tensors, in the model's order; a file exceeds ``shard_bytes`` only with one tensor."""
    parameters = family_named(config.family).model_class().parameters(config)
    shards: list[list[Source]] = [[]]
    size = 0
    for source in (source for parameter in parameters for source in parameter.sources):
        if shards[-1] and size + num_bytes(source) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += num_bytes(source)
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def random_tensor(source: Source, seed: int, device: torch.device) -> torch.Tensor:
    """Ones for a norm, else normal with `WEIGHT_STD`; a function of seed, name and shape."""
    dtype = dtype_of(source)
    if source.name.endswith(("norm.weight", "ln_f.weight")):
        return torch.ones(source.shape, dtype=dtype)
    # 32 bits: the CPU's generator ignores the rest of a seed
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {source.name}".encode()))
    tensor = torch.empty(source.shape, dtype=dtype, device=device)
    return tensor.normal_(0.0, WEIGHT_STD, generator=generator).cpu()


def write_shard(path: Path, sources: Sequence[Source], seed: int, device: torch.device) -> None:
    """One safetensors file, tensor by tensor: 8 bytes of header length, JSON header, the data in order."""
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in sources:
        start, end = end, end + num_bytes(source)
        kind = STORED[dtype_of(source)]
        header[source.name] = {"dtype": kind, "shape": list(source.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    # data must begin at a multiple of 8
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for source in sources:
            file.write(random_tensor(source, seed, device).view(torch.uint8).numpy().data)


def config_json(config: ModelConfig) -> dict[str, object]:
    """``config.json`` as a released checkpoint has it, with the block length and mask token added."""
    family = family_named(config.family)
    found: dict[str, object] = {
        "architectures": list(family.architectures),
        "model_type": config.family,
        "attention_bias": config.attention_bias,
        family.block_length_keys[0]: config.block_length,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[-1],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    if config.partial_rotary_factor != 1.0:
        found["partial_rotary_factor"] = config.partial_rotary_factor
    if config.moe is not None:
        found |= moe_json(config.moe)
    own = dict(family.renamed)
    return {own.get(key, key): value for key, value in found.items()}


def moe_json(moe: MoeConfig) -> dict[str, object]:
    """What a ``config.json`` says of experts."""
    found: dict[str, object] = {
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalise,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
    }
    if moe.score == "softmax":
        return found
    return found | {
        "first_k_dense_replace": moe.first_dense_layers,
        "n_group": moe.num_groups,
        "num_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.scale,
        "score_function": moe.score,
        "topk_group": moe.top_groups,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_checkpoint(
    folder: Path, config: ModelConfig, seed: int = 0, shard_bytes: int = 2**31, device: str = "cpu"
) -> None:
    """Write the checkpoint; shards are generated and written side by side, the configuration last.

    Raises:
        InvalidOption: the folder holds a checkpoint already.
    """
    if (folder / "config.json").exists():
        raise InvalidOption(f"{folder} holds a checkpoint already", "choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(config, shard_bytes)
    target = torch.device(device)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        writes = [
            pool.submit(write_shard, folder / name, sources, seed, target) for name, sources in shards.items()
        ]
        for write in writes:
            write.result()
    total = sum(num_bytes(source) for sources in shards.values() for source in sources)
    weight_map = {source.name: name for name, sources in shards.items() for source in sources}
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    generation = {"eos_token_id": list(config.eos_token_ids), "pad_token_id": config.pad_token_id}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config_json(config))


def shaped(options: argparse.Namespace) -> ModelConfig:
    """The preset with the given options in place; special tokens are moved into a smaller vocabulary.

    Raises:
        InvalidOption: the shape is impossible.
    """
    preset = PRESETS[options.preset]
    changes = {
        field: getattr(options, name)
        for name, field in SHAPE_OPTIONS.items()
        if getattr(options, name) is not None
    }
    moe_changes = {
        field: getattr(options, name)
        for name, field in MOE_OPTIONS.items()
        if getattr(options, name) is not None
    }
    if moe_changes and preset.moe is None:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in MOE_OPTIONS)
        raise InvalidOption(f"{options.preset} has no experts", f"use another preset, or none of {named}")
    if moe_changes:
        changes["moe"] = dataclasses.replace(preset.moe, **moe_changes)
    vocab_size = changes.get("vocab_size", preset.vocab_size)
    if vocab_size <= max(preset.mask_token_id, *preset.eos_token_ids):
        changes.setdefault("mask_token_id", vocab_size - 1)
        changes |= {"eos_token_ids": (vocab_size - 2,), "bos_token_id": None, "pad_token_id": vocab_size - 2}
    return dataclasses.replace(preset, tie_word_embeddings=options.tied, **changes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a checkpoint of random bf16 weights.")
    parser.add_argument("folder", type=Path, help="new folder for the checkpoint")
    parser.add_argument(
        "--preset",
        choices=sorted(name for name, config in PRESETS.items() if config.noise is None),
        default="sdar-8b",
        help="shape to start from (%(default)s)",
    )
    for name, field in SHAPE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"override {field}")
    for name, field in MOE_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"override {field} of the experts")
    parser.add_argument("--tied", action="store_true", help="share embedding and head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gib", type=float, default=2.0, help="size of a shard (%(default)s)")
    parser.add_argument(
        "--device", default="auto", help="where weights are generated: auto (cuda if there is one), cpu, cuda"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shard_bytes = max(1, int(options.shard_gib * 2**30))
    start = time.perf_counter()
    try:
        config = shaped(options)
        shards = plan_shards(config, shard_bytes)
        if not options.dry_run:
            make_checkpoint(options.folder, config, options.seed, shard_bytes, device)
    except UsageError as error:
        print(f"error: {error}")
        return 2
    tensors = [source for sources in shards.values() for source in sources]
    count = sum(math.prod(source.shape) for source in tensors)
    size = sum(map(num_bytes, tensors))
    print(
        f"{'would write' if options.dry_run else 'wrote'} {len(tensors)} tensors, "
        f"{count / 1e9:.2f} G parameters, {size / 2**30:.2f} GiB, in {len(shards)} shards "
        f"to {options.folder}"
    )
    if not options.dry_run:
        seconds = time.perf_counter() - start
        print(f"{seconds:.1f} s, {size / 2**30 / seconds:.2f} GiB/s, generated on {device}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

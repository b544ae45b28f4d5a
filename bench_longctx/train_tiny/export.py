"""Write a trained model as a checkpoint folder in SDAR's format, and read one.

python bench_longctx/train_tiny/export.py --checkpoint DIR --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file, save_file

from bench_longctx.train_tiny import checkpoint, tokenizer
from bench_longctx.train_tiny.model import TinyConfig, TinySDAR


def write(model: TinySDAR, folder: Path) -> None:
    """Write bf16 weights, config.json, generation_config.json and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = asdict(model.config) | {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "mask_token_id": tokenizer.MASK,
        "eos_token_id": tokenizer.EOS,
        "pad_token_id": tokenizer.PAD,
        "bos_token_id": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps(
            {
                "eos_token_id": tokenizer.EOS,
                "pad_token_id": tokenizer.PAD,
                "mask_token_id": tokenizer.MASK,
                "block_length": model.config.block_size,
                "denoising_steps": model.config.block_size,
                "remasking_strategy": "low_confidence_dynamic",
                "confidence_threshold": 0.9,
                "temperature": 0.0,
                "do_sample": False,
                "max_new_tokens": 256,
            },
            indent=2,
        )
        + "\n"
    )
    tokenizer.write(folder)


def read(folder: Path) -> TinySDAR:
    """The model of an exported folder, in float32 (bf16 values)."""
    model = TinySDAR(TinyConfig.from_dict(json.loads((folder / "config.json").read_text())))
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="folder with the ckpt_* files of train.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write(checkpoint.load_model(args.checkpoint), args.out)

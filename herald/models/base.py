"""`BlockModel`: the pieces of a forward that a family provides. Attention stays with the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from herald.models.config import ModelConfig
from herald.models.rope import RotaryEmbedding
from herald.models.weights import Parameter


class BlockModel(ABC):
    """Weights of one checkpoint on one device.

    A forward over T positions is ``embed`` (and ``condition``), then for each layer ``qkv``, attention by the
    caller and ``finish_layer``, then ``logits``. Nothing here keeps state or synchronises the device.

    Args:
        config: shape of the model.
        tensors: what `parameters` lists, by name; all on one device, of one dtype (the first's) but for
            those parameters that have a dtype of their own.

    Attributes:
        softmax_scale: of the scores in attention.
        norm_values: values pass an RMS norm without weights.
    """

    norm_values: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        first = next(iter(tensors.values()))
        self.config = config
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.weight_bytes: int = sum(tensor.nbytes for tensor in tensors.values())
        self.softmax_scale: float = config.head_dim**-0.5
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rope_theta, config.rope_scaling, self.device)
        windowed = config.windowed
        self.window_rotary = self.rotary
        if windowed is not None:
            self.window_rotary = RotaryEmbedding(windowed.head_dim, windowed.rope_theta, None, self.device)

    @classmethod
    @abstractmethod
    def parameters(cls, config: ModelConfig) -> list[Parameter]:
        """Every tensor of the model and the checkpoint tensors it is made of."""

    @classmethod
    def tolerated(cls, config: ModelConfig) -> frozenset[str]:
        """Checkpoint tensors that may be there and are not read."""
        return frozenset()

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] int64 -> hidden states [T, hidden_size]."""

    @abstractmethod
    def qkv(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Input norm and projections: [T, hidden_size] -> [T, (num_heads + 2 num_kv_heads) * head_dim].

        Queries, then keys, then values, head after head; neither normed nor rotated. Without the values where
        they are the keys. KV heads and head_dim are the layer's (`ModelConfig.attention`).
        """

    @abstractmethod
    def qk_norm_weights(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weights of the query and key norms, each [head_dim], None where the family has none."""

    @abstractmethod
    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor, causal: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rest of a layer: output projection, residual, norm, MLP, residual.

        ``hidden`` [T, hidden_size] is the layer's input, ``attention`` [T, num_heads * head_dim]. ``causal``
        bool [T, 1] or [1, 1] says which positions are encoded causally; None where the configuration has no
        canvas. Returns the layer's output [T, hidden_size], which may be ``hidden`` itself, overwritten.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [T, hidden_size] -> [T, vocab_size] in the model's dtype."""

    def condition(self, hidden: torch.Tensor, signal: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        """The input of the first layer where there is a canvas: [T, hidden_size], which may be ``hidden``.

        Args:
            hidden: [T, hidden_size], what `embed` gives.
            signal: [T, hidden_size], what `soft_embedding` made of the step before; zeros before the first.
            causal: bool [T, 1], positions that are encoded causally and take no signal.
        """
        raise NotImplementedError(f"{self.config.family} has no canvas")

    def soft_embedding(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Embedding of tokens by their ``probabilities`` [T, vocab_size]: [T, hidden_size]. Of a canvas."""
        raise NotImplementedError(f"{self.config.family} has no canvas")

    def rope(self, positions: torch.Tensor, windowed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """``positions`` [T] int64 -> (cos, sin), each [T, rotary_dim / 2] float32, of layers of one kind."""
        return self.window_rotary(positions) if windowed else self.rotary(positions)

    def dense_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """One forward of a whole sequence from position 0, in plain torch.

        Block-causal, or with ``full_attention`` bidirectional.

        The truth that faster paths are held to; memory grows with the square of the length.

        ``input_ids`` [n] int64 -> [n, vocab_size] float32; row i predicts position i, or position i + 1 of a
        family that is shifted.
        """
        from herald.models.dense import dense_logits

        return dense_logits(self, input_ids)

"""Random tokens of a canvas, each a function of the request's seed, its position and the step alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

# (seed, first position, step, each int64 [R]; block length; vocabulary size) -> int64 [R, B]
Noise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]

# Constants of SplitMix64 as int64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number
# Generators").
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 31


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch's own copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64; products wrap."""
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def uniform_noise(
    seed: torch.Tensor, position: torch.Tensor, step: torch.Tensor, block_length: int, vocab_size: int
) -> torch.Tensor:
    """Tokens drawn evenly from the vocabulary, the same on every device and in any batch.

    Integer arithmetic on the device, so that it can be part of a CUDA graph: a counter in place of a state
    (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3").

    Args:
        seed: int64 [R], of each request.
        position: int64 [R], of the first token of each canvas.
        step: int64 [R], steps of the canvas before: 0 for what it starts as.
        block_length: B.
        vocab_size: at most 2**31.

    Returns:
        int64 [R, B].
    """
    offset = torch.arange(block_length, device=seed.device)
    value = _mixed(seed[:, None] + (position[:, None] + offset + 1) * _GAMMA)
    value = _mixed(value + (step[:, None] + 1) * _GAMMA)
    return (_shifted(value, 64 - _BITS) * vocab_size) >> _BITS

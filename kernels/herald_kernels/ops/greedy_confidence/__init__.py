"""The arg-max token of each row of logits and its probability."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def greedy_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arg-max and its softmax probability at temperature 1 over the whole vocabulary.

    Args:
        logits: [T, V], float32, float16 or bfloat16; unit stride in the last dimension. -inf is allowed.

    Returns:
        token int64 [T], the lowest id among equals, and confidence float32 [T]. Where a row holds a NaN or
        +inf, or nothing but -inf, the confidence is NaN and the token is some valid id.
    """
    need_unit_stride(logits=logits)
    token, confidence = implementation("greedy_confidence", logits.device.type)(logits)
    return token, confidence

"""The softmax of each row of logits at its own temperature, with its arg-max and entropy."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride

KINDS = (torch.float32, torch.float16, torch.bfloat16)


def entropy_softmax(
    logits: torch.Tensor, temperature: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arg-max, entropy and probabilities of ``softmax(logits / temperature)``, row by row, in float32.

    A row's bits depend on its own inputs and on the size of the vocabulary.

    Args:
        logits: [T, V], float32, float16 or bfloat16; unit stride in the last dimension. -inf is allowed.
        temperature: float32 [T], positive.
        dtype: of the probabilities, float32, float16 or bfloat16.

    Returns:
        token int64 [T], the lowest id among equals; entropy float32 [T] in nats; probabilities [T, V] of
        ``dtype``. Where a row holds a NaN or +inf, or nothing but -inf, the entropy is NaN, the token is some
        valid id and the probabilities are of no use.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    if temperature.shape != logits.shape[:1] or temperature.dtype != torch.float32:
        raise ValueError(
            f"temperature {tuple(temperature.shape)} {temperature.dtype} must be float32 [{logits.shape[0]}]"
        )
    if dtype not in KINDS:
        raise ValueError(f"dtype={dtype} must be one of {', '.join(map(str, KINDS))}")
    need_unit_stride(logits=logits)
    token, entropy, probabilities = implementation("entropy_softmax", logits.device.type)(
        logits, temperature, dtype
    )
    return token, entropy, probabilities

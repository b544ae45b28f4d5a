"""Torch reference of `entropy_softmax`."""

from __future__ import annotations

import torch

# Softmax needs float32 copies of what it works on; this many values of each are alive at once.
CHUNK_VALUES = 1 << 24


def entropy_softmax(
    logits: torch.Tensor, temperature: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `herald_kernels.entropy_softmax`."""
    token = logits.argmax(-1)
    entropy = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    probabilities = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    step = max(1, CHUNK_VALUES // logits.shape[1])
    for first in range(0, logits.shape[0], step):
        rows = slice(first, first + step)
        shares = (logits[rows].float() / temperature[rows, None]).log_softmax(-1)
        chosen = shares.exp()
        # 0 * -inf is 0 here: what cannot be chosen adds nothing. A NaN share stays NaN.
        terms = torch.where(chosen == 0, 0.0, chosen * shares)
        entropy[rows] = -terms.sum(-1)
        probabilities[rows] = chosen.to(dtype)
    return token, entropy, probabilities

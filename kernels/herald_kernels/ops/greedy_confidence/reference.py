"""Torch reference of `greedy_confidence`."""

from __future__ import annotations

import torch

# Softmax needs a float32 copy of what it works on; this many values of it are alive at once.
CHUNK_VALUES = 1 << 24


def greedy_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `herald_kernels.greedy_confidence`."""
    token = logits.argmax(-1)
    confidence = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    step = max(1, CHUNK_VALUES // logits.shape[1])
    for first in range(0, logits.shape[0], step):
        # CPU softmax over the last dimension works row by row: a row's bits do not depend on its neighbours.
        probability = torch.softmax(logits[first : first + step], dim=-1, dtype=torch.float32)
        ids = token[first : first + step, None]
        confidence[first : first + step] = probability.gather(1, ids).squeeze(1)
    return token, confidence

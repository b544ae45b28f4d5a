"""Commits the tokens of a block, on the device."""

from __future__ import annotations

import torch

from herald.decode import Take, candidates, taken
from herald.engine.canvas.request import CanvasRequest


def commit(request: CanvasRequest, logits: torch.Tensor, take: Take, mask_token_id: int) -> torch.Tensor:
    """Write what a step takes into the request's block.

    Args:
        logits: [B, vocab_size], of the rows that predict the block.

    Returns:
        int64 [B + 1] on the device: masks left (-1 after non-finite logits), then the tokens, -1 where
        masked.
    """
    tokens, masked = block_views(request)
    found = candidates(logits, request.plan.rank, mask_token_id, request.params, request.generator)
    write = taken(found.value, masked, take)
    broken = (found.value.isnan() & masked).any()
    tokens.copy_(torch.where(write, found.tokens, tokens))
    masked.logical_and_(~write)
    left = torch.where(broken, -1, masked.sum())
    return torch.cat([left.view(1), torch.where(masked, -1, tokens)])


def block_views(request: CanvasRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [B] and masks bool [B] of the block, as they lie in the request's."""
    assert request.tokens is not None and request.masked is not None
    begin, end = request.begin, request.begin + request.block_length
    prompt = len(request.prompt_ids)
    return request.tokens[begin:end], request.masked[begin - prompt : end - prompt]

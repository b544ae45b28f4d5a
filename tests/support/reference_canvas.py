"""Plain loops over a whole canvas, without cache and batch: what the engine is held to on any prompt."""

from __future__ import annotations

import torch

from herald.models import BlockModel


def decode_llada(
    model: BlockModel, prompt: list[int], length: int, block: int, threshold: float | None
) -> list[int]:
    """Greedy; one position a step, or all that reach the threshold."""
    mask, start = model.config.mask_token_id, len(prompt)
    tokens = torch.tensor(prompt + [mask] * length)
    masked = torch.tensor([False] * start + [True] * length)
    for begin in range(start, start + length, block):
        inside = torch.zeros_like(masked)
        inside[begin : begin + block] = True
        while (masked & inside).any():
            best, found = predictions(model, tokens)
            score = best.masked_fill(~(masked & inside), -1.0)
            write = score >= (2.0 if threshold is None else threshold)
            write[score.argmax()] = True
            tokens[write] = found[write]
            masked &= ~write
    return tokens[start:].tolist()


def decode_dream(model: BlockModel, prompt: list[int], length: int) -> list[int]:
    """Greedy, by entropy, as many steps as positions on a time schedule that ends at 0.001."""
    mask, start = model.config.mask_token_id, len(prompt)
    tokens = torch.tensor(prompt + [mask] * length)
    masked = torch.tensor([False] * start + [True] * length)
    times = torch.linspace(1, 1e-3, length + 1)
    for step in range(length):
        left = int(masked.sum())
        count = left if step == length - 1 else int(left * (1 - times[step + 1] / times[step]))
        logits = model.dense_logits(tokens)
        p = logits.softmax(-1)
        order = (p * (p + 1e-10).log()).sum(-1)
        # row i - 1 stands for position i
        order = torch.cat([order[:1], order[:-1]]).masked_fill(~masked, float("-inf"))
        found = torch.cat([logits[:1], logits[:-1]]).argmax(-1)
        write = order.topk(count).indices
        tokens[write] = found[write]
        masked[write] = False
    return tokens[start:].tolist()


def predictions(model: BlockModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidence and token of every position."""
    confidence, token = model.dense_logits(tokens).softmax(-1).max(-1)
    return confidence, token

"""Fast-dLLM v2 decoding as a plain loop over whole forwards: what every engine must reproduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from herald.models import BlockModel


def reference_fast_dllm(
    model: BlockModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sub_block_length: int,
    threshold: float = float("inf"),
    quota: int = 1,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """New tokens, greedy, cut after the first end token and at ``max_new_tokens``.

    Args:
        threshold: commit every position of the sub-block above it.
        quota: of the sub-block's masked positions, those that a step commits at least.
    """
    block_length, mask = model.config.block_length, model.config.mask_token_id
    stops, prompt_length = set(eos_token_ids), len(prompt_ids)
    sequence = list(prompt_ids)
    while len(sequence) < prompt_length + max_new_tokens:
        start = len(sequence) // block_length * block_length
        if len(sequence) == start:  # the row before the block predicts its first token
            sequence.append(int(model.dense_logits(torch.tensor(sequence))[-1].argmax()))
        fresh, end = len(sequence), start + block_length
        sequence += [mask] * (end - fresh)
        # what is masked is remembered, not read off the tokens: a prompt may hold the mask token
        masked = set(range(fresh, end))
        while masked and not _is_over(sequence[prompt_length:], {i - prompt_length for i in masked}, stops):
            part = (min(masked) - start) // sub_block_length
            asked = [i for i in sorted(masked) if (i - start) // sub_block_length == part]
            logits = model.dense_logits(torch.tensor(sequence))
            confidence, token = logits[[i - 1 for i in asked]].softmax(-1).max(-1)
            over = [k for k in range(len(asked)) if confidence[k] > threshold]
            best = sorted(range(len(asked)), key=lambda k: (-confidence[k].item(), k))[:quota]
            for k in over if len(over) >= len(best) else best:
                sequence[asked[k]] = int(token[k])
                masked.remove(asked[k])
        if stops.intersection(sequence[prompt_length:]):
            break
    output = sequence[prompt_length : prompt_length + max_new_tokens]
    ends = [index for index, token in enumerate(output) if token in stops]
    return output[: ends[0] + 1] if ends else output


def _is_over(output: list[int], masked: set[int], stops: set[int]) -> bool:
    """An end token has no mask before it."""
    ends = [index for index, token in enumerate(output) if token in stops and index not in masked]
    return bool(ends) and not any(index < ends[0] for index in masked)

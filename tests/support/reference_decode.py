"""SDAR decoding as a plain loop over whole forwards: what every engine must reproduce.

No cache and no batch: each step runs the sequence up to the end of the current block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from herald.decode import quota
from herald.models import BlockModel


@dataclass(frozen=True)
class ReferenceStep:
    """Positions a denoising forward wrote, ascending, and their tokens."""

    block: int
    step: int
    positions: list[int]
    tokens: list[int]


@dataclass
class ReferenceOutput:
    """Result of `reference_decode`; the counts of forwards are those of a loop with a cache."""

    output_ids: list[int]
    sequence_ids: list[int]
    steps: list[ReferenceStep] = field(default_factory=list)
    prefill_forwards: int = 0
    commit_forwards: int = 0


def reference_decode(
    model: BlockModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    denoising_steps: int = 0,
    threshold: float | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> ReferenceOutput:
    """Greedy block-diffusion decoding.

    Args:
        denoising_steps: steps a block may take, 0 for one a position.
        threshold: commit every position above it (dynamic); None for the quota alone (static).
        eos_token_ids: stop after the block that holds one; None for the checkpoint's.
    """
    config = model.config
    block_length, mask = config.block_length, config.mask_token_id
    stops = set(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    prompt_length = len(prompt_ids)
    num_blocks = -(-(prompt_length + max_new_tokens) // block_length)
    sequence = list(prompt_ids) + [mask] * (num_blocks * block_length - prompt_length)
    result = ReferenceOutput([], [], prefill_forwards=int(prompt_length >= block_length))
    for block in range(prompt_length // block_length, num_blocks):
        start, end = block * block_length, (block + 1) * block_length
        # what is masked is remembered, not read off the tokens: a prompt may hold the mask token
        masked = list(range(max(start, prompt_length), end))
        for step, share in enumerate(quota(block_length, denoising_steps)):
            if not masked:
                break
            written = _choose(model, sequence[:end], masked, min(share, len(masked)), threshold)
            for position, token in written.items():
                sequence[position] = token
                masked.remove(position)
            result.steps.append(ReferenceStep(block, step, list(written), list(written.values())))
        result.commit_forwards += 1
        result.sequence_ids = sequence[:end]
        if stops.intersection(sequence[max(start, prompt_length) : end]):
            break
    output = sequence[prompt_length : prompt_length + max_new_tokens]
    ends = [index for index, token in enumerate(output) if token in stops]
    result.output_ids = output[: ends[0] + 1] if ends else output
    return result


def _choose(
    model: BlockModel, tokens: list[int], masked: list[int], share: int, threshold: float | None
) -> dict[int, int]:
    """Positions to write, ascending, and their tokens."""
    logits = model.dense_logits(torch.tensor(tokens))[masked]
    confidence, candidate = logits.softmax(dim=-1).max(dim=-1)
    ranked = sorted(range(len(masked)), key=lambda index: (-confidence[index].item(), masked[index]))
    chosen = ranked[:share]
    if threshold is not None:
        over = [index for index in ranked if confidence[index].item() > threshold]
        chosen = over if len(over) >= share else chosen
    return {masked[index]: int(candidate[index]) for index in sorted(chosen)}

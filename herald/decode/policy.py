"""How a family's authors decode a block: its quotas, and whether committed tokens may change."""

from __future__ import annotations

from dataclasses import dataclass

from herald.config import check
from herald.decode.quota import quota
from herald.models.registry import family_named
from herald.sampling_params import SamplingParams


@dataclass(frozen=True)
class DecodePolicy:
    """Every policy commits the most confident masked positions of a step, a quota of them at least.

    Attributes:
        name: by which a `herald.models.registry.Family` refers to it.
        steps_within_tokens: a block that is not edited takes no more steps than the request may make tokens.
        sub_block_length: a step decides within one sub-block of this length, the first that has a mask; 0 for
            blocks that are decoded whole.
        may_edit: `SamplingParams.editing_threshold` is understood: the model was trained to correct tokens.
    """

    name: str
    steps_within_tokens: bool = False
    may_edit: bool = False
    sub_block_length: int = 0

    def quotas(self, block_length: int, params: SamplingParams) -> list[int]:
        """Positions that each step of a block commits at least."""
        steps = params.denoising_steps
        if self.steps_within_tokens and params.editing_threshold is None:
            steps = min(steps or block_length, params.max_tokens)
        return quota(block_length, steps)

    def windows(self, block_length: int, params: SamplingParams, leads: bool = False) -> tuple[int, ...]:
        """Lengths of the parts of a block that are decoded one after the other; they add up to it.

        Args:
            leads: the first position is a part of its own: its token comes from before the block.

        Raises:
            InvalidOption: sub-blocks do not divide the block.
        """
        length = params.sub_block_length or min(self.sub_block_length, block_length) or block_length
        check(
            block_length % length == 0,
            "sub_block_length",
            length,
            f"use a divisor of block_length={block_length}",
        )
        windows = (length,) * (block_length // length)
        return (1, length - 1, *windows[1:]) if leads and length > 1 else windows

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidOption` for options that the policy does not know."""
        threshold = params.editing_threshold
        remedy = "use None: only LLaDA2.1 checkpoints correct their tokens"
        check(self.may_edit or threshold is None, "editing_threshold", threshold, remedy)
        length = params.sub_block_length
        remedy = "use 0: only Fast-dLLM v2 checkpoints decode in sub-blocks"
        check(self.sub_block_length > 0 or length == 0, "sub_block_length", length, remedy)


POLICIES = {
    policy.name: policy
    for policy in (
        # SDAR (arXiv 2510.06303): a fixed quota, or all above a threshold with the quota as the least.
        DecodePolicy("quota"),
        # LLaDA2.0 (arXiv 2512.15745): the same, with steps = min(steps, max_tokens // minimal_topk) and
        # minimal_topk = 1 as released. LLaDA2.1 (arXiv 2602.08676) has the same architecture and edits,
        # without steps: one position a step at least.
        DecodePolicy("llada2", steps_within_tokens=True, may_edit=True),
        # Fast-dLLM v2 (arXiv 2509.26328): all above a threshold, the best one at least, in sub-blocks of 8.
        DecodePolicy("fast_dllm_v2", sub_block_length=8),
    )
}


def policy_of(family: str) -> DecodePolicy:
    """The policy of a family, by its name."""
    return POLICIES[family_named(family).policy]

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
        may_edit: `SamplingParams.editing_threshold` is understood: the model was trained to correct tokens.
    """

    name: str
    steps_within_tokens: bool = False
    may_edit: bool = False

    def quotas(self, block_length: int, params: SamplingParams) -> list[int]:
        """Positions that each step of a block commits at least."""
        steps = params.denoising_steps
        if self.steps_within_tokens and params.editing_threshold is None:
            steps = min(steps or block_length, params.max_tokens)
        return quota(block_length, steps)

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidOption` for options that the policy does not know."""
        threshold = params.editing_threshold
        remedy = "use None: only LLaDA2.1 checkpoints correct their tokens"
        check(self.may_edit or threshold is None, "editing_threshold", threshold, remedy)


POLICIES = {
    policy.name: policy
    for policy in (
        # SDAR (arXiv 2510.06303): a fixed quota, or all above a threshold with the quota as the least.
        DecodePolicy("quota"),
        # LLaDA2.0 (arXiv 2512.15745): the same, with steps = min(steps, max_tokens // minimal_topk) and
        # minimal_topk = 1 as released. LLaDA2.1 (arXiv 2602.08676) has the same architecture and edits,
        # without steps: one position a step at least.
        DecodePolicy("llada2", steps_within_tokens=True, may_edit=True),
    )
}


def policy_of(family: str) -> DecodePolicy:
    """The policy of a family, by its name."""
    return POLICIES[family_named(family).policy]

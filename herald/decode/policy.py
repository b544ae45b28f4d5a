"""How a family's authors decode: what a request's options mean for it, and which of them it does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

from herald.config import check
from herald.decode.canvas import (
    CarriedThreshold,
    Factor,
    FirstAlone,
    FixedQuota,
    Rule,
    Threshold,
    TimeSchedule,
)
from herald.decode.quota import quota
from herald.decode.take import Rank
from herald.models import ModelConfig
from herald.models.noise_config import NoiseConfig
from herald.models.registry import family_named
from herald.sampling_params import CanvasCache, SamplingParams

# Of a block-causal family, where a request leaves it to us.
BLOCK_THRESHOLD = 0.9


class Policy(ABC):
    """Settles the options of a request.

    Attributes:
        name: by which a `herald.models.registry.Family` refers to it.
    """

    name: str

    def settle(self, params: SamplingParams) -> SamplingParams:
        """The options with the family's defaults in the place of ``"auto"``.

        Raises:
            InvalidOption: the family does not know one of them.
        """
        self.check(params)
        return self._settled(params)

    @abstractmethod
    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidOption` for options that the policy does not know."""

    @abstractmethod
    def _settled(self, params: SamplingParams) -> SamplingParams: ...


def _check_no_entropies(params: SamplingParams) -> None:
    remedy = "use None: only a canvas of random tokens (DiffusionGemma) is decoded by entropy"
    check(params.entropy_bound is None, "entropy_bound", params.entropy_bound, remedy)
    check(params.stop_entropy is None, "stop_entropy", params.stop_entropy, remedy)


@dataclass(frozen=True)
class DecodePolicy(Policy):
    """Blocks one after the other, each final before the next: a quota of the most confident positions a step.

    Attributes:
        steps_within_tokens: a block that is not edited takes no more steps than the request may make tokens.
        sub_block_length: a step decides within one sub-block of this length, the first that has a mask; 0 for
            blocks that are decoded whole.
        may_edit: `SamplingParams.editing_threshold` is understood: the model was trained to correct tokens.
        blocks_from_prompt: blocks are counted from the end of the prompt, not from position 0.
    """

    name: str
    steps_within_tokens: bool = False
    may_edit: bool = False
    sub_block_length: int = 0
    blocks_from_prompt: bool = False

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

    def is_certain(self, params: SamplingParams) -> bool:
        """Whether the host knows how much a step commits before it has run."""
        return params.confidence_threshold is None and params.editing_threshold is None

    def check(self, params: SamplingParams) -> None:
        threshold = params.editing_threshold
        remedy = "use None: only LLaDA2.1 checkpoints correct their tokens"
        check(self.may_edit or threshold is None, "editing_threshold", threshold, remedy)
        length = params.sub_block_length
        remedy = "use 0: only Fast-dLLM v2 checkpoints decode in sub-blocks"
        check(self.sub_block_length > 0 or length == 0, "sub_block_length", length, remedy)
        cache, factor, algorithm = params.cache, params.confidence_factor, params.algorithm
        check(cache == "auto", "cache", cache, "use 'auto': this family has an exact cache")
        check(factor is None, "confidence_factor", factor, "use None: it is known for LLaDA only")
        check(algorithm == "auto", "algorithm", algorithm, "use 'auto': only Dream has several")
        _check_no_entropies(params)

    def _settled(self, params: SamplingParams) -> SamplingParams:
        auto = params.confidence_threshold == "auto"
        return replace(params, confidence_threshold=BLOCK_THRESHOLD) if auto else params


@dataclass(frozen=True)
class NoisePolicy(DecodePolicy):
    """Decoding of a canvas; see `herald.decode.entropy_bound`. What a block takes is counted in steps.

    Attributes:
        noise: settings of the checkpoint.
    """

    noise: NoiseConfig = field(default_factory=NoiseConfig)

    def rules(self, params: SamplingParams) -> NoiseConfig:
        """The checkpoint's settings, but for those that a request brings."""
        bound, stop = params.entropy_bound, params.stop_entropy
        return replace(
            self.noise,
            max_steps=params.denoising_steps or self.noise.max_steps,
            entropy_bound=self.noise.entropy_bound if bound is None else bound,
            stop_entropy=self.noise.stop_entropy if stop is None else stop,
        )

    def quotas(self, block_length: int, params: SamplingParams) -> list[int]:
        """One for each step that the canvas may take."""
        return [1] * self.rules(params).max_steps

    def is_certain(self, params: SamplingParams) -> bool:
        """Whether the canvas takes all its steps."""
        return self.rules(params).stop_entropy == 0

    def check(self, params: SamplingParams) -> None:
        super().check(replace(params, entropy_bound=None, stop_entropy=None))
        threshold = params.confidence_threshold
        remedy = "leave it out: a canvas is accepted by entropy_bound, and ends by stop_entropy"
        check(threshold in (None, "auto"), "confidence_threshold", threshold, remedy)

    def _settled(self, params: SamplingParams) -> SamplingParams:
        return replace(params, confidence_threshold=None)


@dataclass(frozen=True)
class CanvasPlan:
    """How one request's canvas is decoded.

    Attributes:
        length: positions of the canvas, a multiple of ``block_length``.
        block_length: positions denoised together.
        cache: what is kept while a block is denoised, settled.
        rank: by what positions are ranked.
        rule: what each step takes.
    """

    length: int
    block_length: int
    cache: CanvasCache
    rank: Rank
    rule: Rule

    @property
    def num_blocks(self) -> int:
        return self.length // self.block_length


class CanvasPolicy(Policy):
    """All of the output is there from the start, as masks that every position sees."""

    def plan(self, params: SamplingParams, block_length: int) -> CanvasPlan:
        """What settled options ask for.

        Args:
            block_length: of the checkpoint, 0 for the whole canvas.
        """
        wanted = params.block_length or block_length or self._block_length(params)
        block = min(wanted, params.max_tokens) or params.max_tokens
        length = -(-params.max_tokens // block) * block
        rank, rule = self._rule(params, whole=not wanted)
        return CanvasPlan(length, block, params.cache, rank, rule)

    def check(self, params: SamplingParams) -> None:
        editing = params.editing_threshold
        check(editing is None, "editing_threshold", editing, "use None: only LLaDA2.1 corrects its tokens")
        length = params.sub_block_length
        check(length == 0, "sub_block_length", length, "use 0: only Fast-dLLM v2 decodes in sub-blocks")
        _check_no_entropies(params)

    def _settled(self, params: SamplingParams) -> SamplingParams:
        threshold, cache = params.confidence_threshold, params.cache
        return replace(
            params,
            confidence_threshold=None if threshold == "auto" else threshold,
            cache="none" if cache == "auto" else cache,
        )

    def _block_length(self, params: SamplingParams) -> int:
        """Where neither request nor checkpoint says; 0 for the whole canvas."""
        return 0

    @abstractmethod
    def _rule(self, params: SamplingParams, whole: bool) -> tuple[Rank, Rule]:
        """For settled options; ``whole``: the canvas is one block because nothing else was said."""


class LladaPolicy(CanvasPolicy):
    """LLaDA (arXiv 2502.09992): by default a fixed quota a step, low-confidence remasking, greedy.

    Released: steps = gen_length, block_length 32 on the model cards. Fast-dLLM (arXiv 2505.22618) adds
    threshold and factor.
    """

    name = "llada"

    def check(self, params: SamplingParams) -> None:
        super().check(params)
        algorithm, factor, threshold = params.algorithm, params.confidence_factor, params.confidence_threshold
        check(algorithm == "auto", "algorithm", algorithm, "use 'auto': only Dream has several")
        both = factor is not None and threshold not in (None, "auto")
        check(not both, "confidence_factor", factor, "use None beside a confidence_threshold")

    def _rule(self, params: SamplingParams, whole: bool) -> tuple[Rank, Rule]:
        if params.confidence_factor is not None:
            return "confidence", Factor(params.confidence_factor)
        threshold = params.confidence_threshold
        if threshold is None:
            return "confidence", FixedQuota(params.denoising_steps)
        assert threshold != "auto"
        return "confidence", Threshold(threshold)


class DreamPolicy(CanvasPolicy):
    """Dream (arXiv 2508.15487): the whole canvas at once, ranked by entropy, on a time schedule.

    So on its model card, with as many steps as tokens. With a cache it goes by blocks of 32, and a threshold
    decides as Fast-dLLM's code for Dream does, with and without one.
    """

    name = "dream"
    ranks: ClassVar[dict[str, Rank]] = {
        "auto": "entropy",
        "entropy": "entropy",
        "maskgit_plus": "confidence",
        "topk_margin": "margin",
    }

    def check(self, params: SamplingParams) -> None:
        super().check(params)
        factor, algorithm = params.confidence_factor, params.algorithm
        check(factor is None, "confidence_factor", factor, "use None: it is known for LLaDA only")
        by_confidence = params.confidence_threshold in (None, "auto")
        by_confidence = by_confidence or algorithm in ("auto", "maskgit_plus")
        remedy = "use 'auto' or 'maskgit_plus' beside a confidence_threshold"
        check(by_confidence, "algorithm", algorithm, remedy)

    def _block_length(self, params: SamplingParams) -> int:
        return 0 if params.cache == "none" else 32

    def _rule(self, params: SamplingParams, whole: bool) -> tuple[Rank, Rule]:
        threshold, steps = params.confidence_threshold, params.denoising_steps
        if threshold is None:
            schedule = TimeSchedule(steps)
            return self.ranks[params.algorithm], schedule if whole else FirstAlone(schedule)
        assert threshold != "auto"
        if whole:
            return "confidence", CarriedThreshold(threshold, steps)
        return "confidence", FirstAlone(Threshold(threshold))


POLICIES: dict[str, Policy] = {
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
        LladaPolicy(),
        DreamPolicy(),
        NoisePolicy("entropy_bound", blocks_from_prompt=True),
    )
}


def policy_of(family: str) -> Policy:
    """The policy of a family, by its name."""
    return POLICIES[family_named(family).policy]


def policy_for(config: ModelConfig) -> Policy:
    """The policy of a checkpoint, with its settings."""
    policy = policy_of(config.family)
    if isinstance(policy, NoisePolicy) and config.noise is not None:
        return replace(policy, noise=config.noise)
    return policy

"""What a request asks of decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from herald.config import check, check_kinds, is_number, is_whole

Algorithm = Literal["auto", "maskgit_plus", "entropy", "topk_margin"]
CanvasCache = Literal["auto", "none", "prefix", "dual"]


@dataclass(frozen=True)
class SamplingParams:
    """Decoding options of one request.

    Args:
        max_tokens: new tokens at most; the last block is cut to it.
        temperature: 0 is greedy (arg-max, lowest id wins).
        top_p: nucleus share in (0, 1]; acts on sampling only, never on a confidence.
        top_k: candidates kept, 0 for all.
        seed: of the request's own generator, 0 to 2**63 - 1; None draws one.
        stop: strings that end the output, which is cut before them.
        denoising_steps: steps T a block may take; 0 for one step a position, of a canvas the
            checkpoint's. With the threshold strategy it is the quota that guarantees progress.
        confidence_threshold: commit every masked position above it in a step
            (``low_confidence_dynamic``); None for a fixed quota a step (``low_confidence_static``);
            ``"auto"`` for the family's: 0.9, with full attention None.
        editing_threshold: replace a committed token of the block under way where another one is likelier than
            this (LLaDA2.1 was trained for it: 0.5, or 0.0 beside a low ``confidence_threshold``); None keeps
            what was committed.
        max_post_steps: with ``editing_threshold``, steps a block may take without a masked position.
        confidence_factor: LLaDA: commit the n most confident positions, n the largest with
            (n + 1) (1 - n-th confidence) <= factor (Fast-dLLM); None for quota or threshold.
        algorithm: Dream: what ranks positions, by the names of its released code; ``"auto"`` for
            ``"entropy"``, as on its model card.
        cache: of a family with full attention, whose keys and values change with every token: ``"none"``
            computes all of them in every step, as released; ``"prefix"`` keeps those before the block while
            it is denoised, ``"dual"`` all but the block's (Fast-dLLM; both approximate). ``"auto"`` is
            ``"none"`` there; other families have an exact cache and take no other value.
        entropy_bound: of a canvas of random tokens (DiffusionGemma): tokens are accepted in order of rising
            entropy while the sum of those before is at most this, in nats; None for the checkpoint's.
        stop_entropy: likewise: a canvas whose arg-max tokens did not change is finished below this mean
            entropy, in nats; 0 for never before its last step, None for the checkpoint's.
        block_length: positions denoised together; 0 for the checkpoint's.
        sub_block_length: a step commits within the first part of the block that has a mask, of this length
            (Fast-dLLM v2); 0 for the family's own, which is 8 there.
        ignore_eos: go on after an end-of-sequence token.
        kv_budget: rows attended to / rows of the prefix, in (0, 1], instead of the engine's
            (`OffloadConfig.kv_budget`); None for that.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    denoising_steps: int = 0
    confidence_threshold: float | Literal["auto"] | None = "auto"
    editing_threshold: float | None = None
    max_post_steps: int = 16
    confidence_factor: float | None = None
    algorithm: Algorithm = "auto"
    cache: CanvasCache = "auto"
    entropy_bound: float | None = None
    stop_entropy: float | None = None
    block_length: int = 0
    sub_block_length: int = 0
    ignore_eos: bool = False
    kv_budget: float | None = None

    def __post_init__(self) -> None:
        check(isinstance(self.stop, (str, tuple, list)), "stop", self.stop, "use a string or a list of them")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        check_kinds(self, optional=("editing_threshold", "entropy_bound", "stop_entropy"))
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "use 1 or more")
        check(
            0.0 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "use 0 (greedy) or more, such as 1.0",
        )
        check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "use a share in (0, 1]")
        check(self.top_k >= 0, "top_k", self.top_k, "use 0 for all candidates, or 1 or more")
        check(
            self.seed is None or (is_whole(self.seed) and 0 <= self.seed < 2**63),
            "seed",
            self.seed,
            f"use 0 to {2**63 - 1}, or None to draw one",
        )
        check(
            all(isinstance(s, str) and s for s in stop), "stop", self.stop, "use strings that are not empty"
        )
        check(
            self.denoising_steps >= 0,
            "denoising_steps",
            self.denoising_steps,
            "use 0 for one step a position",
        )
        threshold = self.confidence_threshold
        check(
            threshold is None or threshold == "auto" or (is_number(threshold) and 0.0 <= threshold <= 1.0),
            "confidence_threshold",
            threshold,
            "use a probability such as 0.9, None for a fixed quota a step, or 'auto'",
        )
        editing = self.editing_threshold
        check(
            editing is None or (is_number(editing) and 0.0 <= editing <= 1.0),
            "editing_threshold",
            editing,
            "use a probability such as 0.5, or None to keep what was committed",
        )
        factor = self.confidence_factor
        check(
            factor is None or (is_number(factor) and 0.0 < factor < math.inf),
            "confidence_factor",
            factor,
            "use a number above 0, such as 1.0, or None",
        )
        check(
            self.algorithm in ("auto", "maskgit_plus", "entropy", "topk_margin"),
            "algorithm",
            self.algorithm,
            "use 'auto', 'maskgit_plus', 'entropy' or 'topk_margin'",
        )
        check(
            self.cache in ("auto", "none", "prefix", "dual"),
            "cache",
            self.cache,
            "use 'auto', 'none', 'prefix' or 'dual'",
        )
        check(self.max_post_steps >= 0, "max_post_steps", self.max_post_steps, "use 0 or more, such as 16")
        bound, stop_below = self.entropy_bound, self.stop_entropy
        check(
            bound is None or (is_number(bound) and 0.0 < bound < math.inf),
            "entropy_bound",
            bound,
            "use more than 0, such as 0.1, or None for the checkpoint's",
        )
        check(
            stop_below is None or (is_number(stop_below) and 0.0 <= stop_below < math.inf),
            "stop_entropy",
            stop_below,
            "use 0 (never) or more, such as 0.005, or None for the checkpoint's",
        )
        check(self.block_length >= 0, "block_length", self.block_length, "use 0 for the checkpoint's")
        sub_block = self.sub_block_length
        check(
            sub_block >= 0, "sub_block_length", sub_block, "use 0 for the family's, or a divisor of the block"
        )
        budget = self.kv_budget
        check(
            budget is None or (is_number(budget) and 0.0 < budget <= 1.0),
            "kv_budget",
            budget,
            "use a share in (0, 1], such as 0.08, or None for the engine's",
        )

"""What a request may ask for: known tokens, positions of the model, blocks that fit into pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from herald.config import OffloadConfig, check
from herald.decode import CanvasPolicy, DecodePolicy, policy_for
from herald.errors import InvalidOption, PromptTooLong
from herald.models import ModelConfig
from herald.sampling_params import SamplingParams


def check_prompt(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    block: int,
    config: ModelConfig,
    limit: int,
    output: int = 0,
    from_prompt: bool = False,
) -> None:
    """Refuse a prompt that could never run.

    Args:
        block: block length of the request.
        limit: positions a request may use.
        output: of them those that the output takes, 0 for ``max_tokens``.
        from_prompt: blocks are counted from the end of the prompt.

    Raises:
        InvalidOption: no tokens, or one that is not in the vocabulary or stands for a picture.
        PromptTooLong: prompt and ``max_tokens`` need more positions than ``limit``.
    """
    if not prompt_ids:
        raise InvalidOption("the prompt has no tokens", "pass at least one token", "prompt")
    vocab = config.vocab_size
    bad = next((t for t in prompt_ids if not 0 <= t < vocab), None)
    if bad is not None:
        problem = f"token id {bad} is not in the vocabulary"
        raise InvalidOption(problem, f"use ids from 0 to {vocab - 1}", "prompt")
    media = set(prompt_ids).intersection(config.media_token_ids)
    if media:
        raise InvalidOption(
            f"token id {min(media)} stands for what is no text",
            "prompt with text alone: nothing else is read",
            "prompt",
        )
    check(block <= limit, "block_length", block, f"use at most {limit}")
    output = output or params.max_tokens
    before = len(prompt_ids) if from_prompt else 0
    needed = before - (before - len(prompt_ids) - output) // block * block
    if needed <= limit:
        return
    if from_prompt:
        room, longest = limit + -output // block * block, (limit - 1) // block * block + 1
    else:
        longest = limit // block * block
        room = longest - output
    remedy = f"use at most {room:,} prompt tokens, a smaller max_tokens"
    if room < 1:
        remedy = f"use max_tokens below {longest:,}"
    raise PromptTooLong(
        f"prompt of {len(prompt_ids):,} tokens + max_tokens={params.max_tokens:,} exceed "
        f"the limit of {limit:,} positions",
        f"{remedy}, or {_allowing(needed, limit, config)}",
        "prompt" if room >= 1 else "max_tokens",
    )


def output_room(config: ModelConfig, limit: int, prompt_tokens: int, params: SamplingParams) -> int:
    """The largest ``max_tokens`` that a prompt leaves room for; below 1 where there is none.

    Args:
        limit: positions a request may use.
        params: of the request, but for their ``max_tokens``.

    Raises:
        InvalidOption: the family does not know one of them.
    """
    policy, left = policy_for(config), limit - prompt_tokens
    settled = policy.settle(replace(params, max_tokens=max(left, 1)))
    if isinstance(policy, CanvasPolicy):
        block = policy.plan(settled, config.block_length).block_length
        return left // block * block
    block = params.block_length or config.block_length
    assert isinstance(policy, DecodePolicy)
    return left // block * block if policy.blocks_from_prompt else limit // block * block - prompt_tokens


def offload_for(config: ModelConfig, offload: OffloadConfig) -> OffloadConfig:
    """The options, without a refresh after many commits where tokens stay open until their block ends."""
    return replace(offload, refresh_commits=0.0) if config.full_attention or config.noise else offload


def model_len(config: ModelConfig, wanted: int) -> int:
    """Positions a request may use, where the user asked for ``wanted``, 0 for all that the model has.

    Raises:
        InvalidOption: the model has fewer; names the option that gives it more.
    """
    limit = config.max_positions
    if wanted > limit:
        raise InvalidOption(
            f"max_model_len={wanted:,} is more than the model's {limit:,} positions",
            f"use at most {limit:,}, or {_allowing(wanted, limit, config)}",
            "max_model_len",
        )
    return wanted or limit


def check_positions(positions: int, limit: int, config: ModelConfig) -> None:
    """Refuse more positions than ``limit``.

    Raises:
        PromptTooLong: names the option that would allow them.
    """
    if positions > limit:
        raise PromptTooLong(
            f"{positions:,} positions exceed the limit of {limit:,}",
            f"use at most {limit:,}, or {_allowing(positions, limit, config)}",
        )


def _allowing(needed: int, limit: int, config: ModelConfig) -> str:
    """The options with which as many positions as ``needed`` could be used."""
    options = []
    if limit < config.max_positions:
        options.append(f"max_model_len={needed}")
    if config.max_positions < needed:
        scaling = config.rope_scaling
        made_for = config.max_position_embeddings if scaling is None else scaling.original_max_positions
        factor = -(-needed // made_for)
        options.append(f"rope_scaling='yarn:{factor}' (the model was made for {made_for:,} positions)")
    return " and ".join(options)


def check_page(block: int, page_size: int) -> None:
    """Refuse blocks that would cross pages of the host pool.

    Raises:
        InvalidOption: names a page size that works.
    """
    if page_size % block:
        raise InvalidOption(
            f"block_length={block} does not divide the page size {page_size}",
            f"use page_size={-(-page_size // block) * block} or another block length",
            "block_length",
        )


def offload_of(params: SamplingParams, offload: OffloadConfig) -> OffloadConfig:
    """The offload options of a request: the engine's, with the request's own budget.

    Raises:
        InvalidOption: it names a budget where every row is on the device.
    """
    if params.kv_budget is None:
        return offload
    if not offload.enabled:
        raise InvalidOption(
            f"kv_budget={params.kv_budget!r} has no meaning without offload",
            "use None, or an engine with offload",
            "kv_budget",
        )
    return replace(offload, kv_budget=params.kv_budget)

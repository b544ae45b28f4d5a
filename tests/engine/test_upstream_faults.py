"""Faults that published decoding loops have, and that no family may have here.

Each test runs over every golden checkpoint of every block-causal family with a mask token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.engine.request import Request
from herald.models.registry import FAMILIES, family_named
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from tests.engine.support import random_prompt, run, tokens
from tests.support.golden import GOLDEN, LOGITS_TOLERANCE, golden_model

BLOCK_CAUSAL = [f for f in FAMILIES if not f.full_attention and f.mask_token_id is not None]
FOLDERS = [folder for family in BLOCK_CAUSAL for folder in family.golden]
every_checkpoint = pytest.mark.parametrize("folder", FOLDERS)
DENSE = OffloadConfig(enabled=False)
SPARSE = OffloadConfig(kv_budget=0.3, sink_rows=2, recent_rows=8, min_resident_rows=16)
Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """``make(folder, offload)``: engines that are closed after the test."""
    engines: list[Engine] = []

    def build(folder: str, offload: OffloadConfig = SPARSE) -> Engine:
        engine = Engine(
            golden_model(folder), Tokenizer(GOLDEN / folder), offload, EngineConfig(), seed=0, poison=True
        )
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def settings(folder: str) -> list[SamplingParams]:
    """Ways to decode that the family knows: fixed quotas, thresholds, and editing where there is editing."""
    usual = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=0.9)
    found = [
        usual,
        replace(usual, confidence_threshold=0.0),
        replace(usual, confidence_threshold=1.0, denoising_steps=2),
        replace(usual, confidence_threshold=None),
        replace(usual, confidence_threshold=None, denoising_steps=3),
    ]
    if "llada21" in folder:  # made with a mask token that is often the likeliest: only editing excludes it
        edited = replace(usual, confidence_threshold=0.5, editing_threshold=0.0, max_post_steps=4)
        return [edited, replace(edited, confidence_threshold=1.0, editing_threshold=0.4)]
    return found


def prompts_around(block: int) -> list[list[int]]:
    """Prompts that end within a block, at its begin and before its end."""
    return [random_prompt(n, n) for n in (1, block - 1, block, 3 * block - 1, 64 + block // 2)]


@every_checkpoint
def test_prompt_tokens_are_never_overwritten(make: Make, folder: str) -> None:
    """Not in the partial first block, whatever is committed or edited there, nor where they are masks."""
    engine = make(folder)
    block, seen = engine.model.config.block_length, 0
    prompts = prompts_around(block)
    for prompt in prompts[2:]:
        prompt[-1] = prompt[-2] = engine.model.config.mask_token_id

    def watch(live: list[Request]) -> None:
        nonlocal seen
        for request in live:
            if request.slot >= 0 and request.block == request.prompt_blocks:
                tail = request.prompt_ids[request.first_prefix :]
                table = engine.decoder.table(block)
                assert table.tokens[request.slot].tolist()[: len(tail)] == tail
                assert table.draft[request.slot].tolist()[: len(tail)] == tail
                assert not table.masked[request.slot, : len(tail)].any()
                seen += len(tail)

    for params in settings(folder):
        run(engine, prompts, params, watch)
    assert seen > 50


@every_checkpoint
def test_mask_ids_in_a_prompt_are_tokens(make: Make, folder: str) -> None:
    """They stay, nothing waits for them to be decoded, and rows of them are rows like others."""
    dense, offloaded = make(folder, DENSE), make(folder, OffloadConfig(kv_budget=1.0, difference_only=False))
    block, mask = dense.model.config.block_length, dense.model.config.mask_token_id
    prompts = prompts_around(block)
    for prompt in prompts:
        prompt[-1] = prompt[0] = prompt[len(prompt) // 2] = mask
    plain = prompts_around(block)
    for params in settings(folder)[:1]:
        requests = run(dense, prompts, params)
        assert all(len(request.output_ids) == 20 for request in requests)
        assert tokens(run(offloaded, prompts, params)) == tokens(requests)
        assert tokens(run(dense, plain, params)) != tokens(requests)


@every_checkpoint
def test_a_mask_token_that_is_the_likeliest_ends_no_loop(
    make: Make, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step commits what it has to, also where the model predicts the mask itself everywhere."""
    engine = make(folder)
    config, predict = engine.model.config, engine.model.logits

    def always_masks(hidden: torch.Tensor) -> torch.Tensor:
        logits = predict(hidden)
        logits[:, config.mask_token_id] = logits.abs().max() + 10.0
        return logits

    monkeypatch.setattr(engine.model, "logits", always_masks)
    prompts = prompts_around(config.block_length)
    usual = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=0.9)
    for params in [*settings(folder)[::2], usual]:
        requests = run(engine, prompts, params)
        edits = params.editing_threshold is not None
        most = config.block_length + (params.max_post_steps if edits else 0)
        for request in requests:
            assert len(request.output_ids) == 20
            assert request.counters.steps <= request.counters.blocks * most
            # a corrected block never takes a mask; elsewhere it is a token like any other
            assert (config.mask_token_id in request.output_ids) != edits


@every_checkpoint
def test_no_block_ends_with_masks_in_it(make: Make, folder: str) -> None:
    """Whatever the steps and thresholds, a finished block holds tokens, and all of them are shown."""
    engine = make(folder)
    block, mask = engine.model.config.block_length, engine.model.config.mask_token_id
    closed: list[list[int]] = []

    def watch(live: list[Request]) -> None:
        opened = [r.slot for r in live if r.slot >= 0 and r.block > r.prompt_blocks and not r.unread]
        closed.extend(engine.decoder.table(block).closed[opened].tolist())

    for params in settings(folder):
        for request in run(engine, prompts_around(block), params, watch):
            assert len(request.output_ids) == 20 and mask not in request.output_ids
    assert closed and not any(mask in tokens_of_block for tokens_of_block in closed)


@every_checkpoint
def test_nothing_behind_a_block_is_seen(folder: str) -> None:
    """A mask of zeros and ones that is added to scores, as published code does, hides nothing."""
    model = golden_model(folder)
    block = model.config.block_length
    ids = torch.tensor(random_prompt(4 * block, 1))
    whole = model.dense_logits(ids)
    changed = ids.clone()
    changed[2 * block :] = torch.tensor(random_prompt(2 * block, 2))
    end = 2 * block
    assert (model.dense_logits(changed)[:end] - whole[:end]).abs().max() < LOGITS_TOLERANCE
    assert (model.dense_logits(ids[:end]) - whole[:end]).abs().max() < LOGITS_TOLERANCE
    # and what is in the block, or before it, is seen
    for position in (end - 1, 0):
        other = ids.clone()
        other[position] = (other[position] + 1) % 300
        assert (model.dense_logits(other)[block:end] - whole[block:end]).abs().max() > 0.01


@every_checkpoint
def test_stored_rows_do_not_depend_on_what_follows(make: Make, folder: str) -> None:
    """The same of prefill, chunk by chunk: rows of a page are those of the prompt that ends with it."""
    engine = make(folder)
    prompt = random_prompt(128 + engine.model.config.block_length, 3)

    def rows_of(length: int) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def keep(live: list[Request]) -> None:
            assert engine.memory.store is not None and engine.retriever is not None
            if not found and live[0].pages is not None and live[0].prefill is None:
                engine.retriever.drain()
                found.append(engine.memory.store.pool.rows[:, live[0].pages[0]].clone())

        params = SamplingParams(max_tokens=2 * engine.model.config.block_length, ignore_eos=True)
        run(engine, [prompt[:length]], params, keep)
        return found[0]

    alone, followed = rows_of(64), rows_of(len(prompt))
    assert (alone - followed).abs().max() < LOGITS_TOLERANCE
    assert alone.abs().max() > 0.1


def test_every_block_causal_family_is_here() -> None:
    architectures: set[Any] = {family_named(golden_model(folder).config.family).name for folder in FOLDERS}
    assert architectures == {family.name for family in BLOCK_CAUSAL}

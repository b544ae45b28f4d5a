"""Budget 1.0 gives the tokens of the engine without offload, over every edge a prompt can have."""

from __future__ import annotations

import random

import pytest

from herald import LLM
from herald.config import EngineConfig, OffloadConfig
from herald.sampling_params import SamplingParams
from tests.engine.conftest import DENSE, MakeEngine
from tests.engine.support import random_prompt, run, tokens

PAGE = 64


def edge_lengths(block: int, longest: int, count: int, seed: int) -> list[int]:
    """Lengths one below, at and one above multiples of blocks and pages, and some at random."""
    rng = random.Random(seed)
    edges = [
        1,
        2,
        block - 1,
        block,
        block + 1,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        2 * PAGE - block,
        2 * PAGE - 1,
        2 * PAGE,
    ]
    while len(edges) < count * 3 // 4:
        edges.append(rng.randrange(1, longest // PAGE) * PAGE + rng.choice((-block, -1, 0, 1, block)))
    while len(edges) < count:
        edges.append(rng.randint(1, longest))
    return edges[:count]


@pytest.mark.parametrize("folder", ["sdar_b4", "sdar_b8"])
def test_golden_checkpoints(make_engine: MakeEngine, folder: str) -> None:
    block = 4 if folder == "sdar_b4" else 8
    lengths = edge_lengths(block, 900, 50, seed=1)
    prompts = [random_prompt(n, i) for i, n in enumerate(lengths)]
    rng = random.Random(2)
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 5 * block),
            denoising_steps=rng.choice((0, 1, 2)),
            confidence_threshold=rng.choice((None, 0.3, 0.9)),
        )
        for _ in prompts
    ]
    expected = tokens(run(make_engine(folder, DENSE), prompts, params))
    for difference_only in (True, False):
        offload = OffloadConfig(kv_budget=1.0, difference_only=difference_only)
        found = tokens(run(make_engine(folder, offload), prompts, params))
        assert found == expected, f"difference_only={difference_only}"


def compare_on_tiny(lengths: list[int]) -> None:
    """Random bytes through the bundled model, dense and at budget 1.0 with every row travelling."""
    prompts = [random_prompt(n, i, vocab=256) for i, n in enumerate(lengths)]
    params = SamplingParams(max_tokens=36, ignore_eos=True, seed=0)
    limits = EngineConfig(max_num_seqs=4)
    with LLM("tiny", device="cpu", offload=DENSE, engine=limits) as llm:
        expected = [o.token_ids for o in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
    offload = OffloadConfig(kv_budget=1.0, difference_only=False)
    with LLM("tiny", device="cpu", offload=offload, engine=limits) as llm:
        found = [o.token_ids for o in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
    for length, a, b in zip(lengths, expected, found, strict=True):
        assert a == b, f"prompt of {length} tokens"


def test_tiny_quick() -> None:
    compare_on_tiny([*edge_lengths(16, 1200, 14, seed=3), 4095])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tiny_fifty_prompts() -> None:
    lengths = edge_lengths(16, 4000, 46, seed=4)
    compare_on_tiny([*lengths, 8191, 8192, 8208, 9216])

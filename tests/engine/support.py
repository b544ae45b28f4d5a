"""Shared helpers of the engine tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from herald.engine.engine import Engine
from herald.engine.request import Phase, Request
from herald.sampling_params import SamplingParams


def random_prompt(length: int, seed: int, vocab: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def run(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    each_step: Callable[[list[Request]], None] | None = None,
) -> list[Request]:
    """Decode prompts in one batch and return their requests, in order."""
    many = params if isinstance(params, list) else [params] * len(prompts)
    requests = [engine.add_request(p, q) for p, q in zip(prompts, many, strict=True)]
    for _ in range(100_000):
        if all(r.phase is Phase.FINISHED for r in requests):
            break
        engine.step()
        if each_step is not None:
            each_step([r for r in requests if r.phase is not Phase.FINISHED])
    for request in requests:
        if request.error is not None:
            raise request.error
    return requests


def tokens(requests: list[Request]) -> list[list[int]]:
    return [list(r.output_ids) for r in requests]


def check_resident_rows(engine: Engine, requests: list[Request]) -> int:
    """Every slot of every decoding request holds, bit for bit, the pool's row of its position.

    Returns:
        Rows compared.
    """
    if engine.retriever is None or engine.memory.store is None:
        return 0
    engine.retriever.drain()
    pool = engine.memory.store.pool
    size = engine.memory.layout.page_size
    compared = 0
    for request in requests:
        if request.phase is not Phase.DECODE or request.resident is None or request.pages is None:
            continue
        resident = request.resident
        _, length, slots = resident.snapshot()
        held = slots[:, :, :length]
        for layer, head in np.ndindex(held.shape[:2]):
            positions = held[layer, head]
            assert len(set(positions.tolist())) == resident.length, "a position is resident twice"
            assert positions.min(initial=0) >= 0
            assert positions.max(initial=-1) < resident.prefix
            pages = request.pages[positions // size]
            expected = pool.rows[layer][pages, head, positions % size]
            start = resident.row_start
            found = engine.memory.arena.rows[layer, head, start : start + resident.length].cpu()
            assert found.equal(expected), f"layer {layer} head {head}: a slot differs from the pool"
            compared += len(positions)
    return compared


def leaks(engine: Engine) -> list[str]:
    """What is still owned after every request ended."""
    found = []
    if engine.retriever is not None:
        engine.retriever.drain()
    if not engine.memory.arena.idle:
        found.append("arena rows")
    store = engine.memory.store
    if store is not None:
        pages = store.pool.allocator
        if pages.num_free + len(engine.memory.prefixes) != pages.num_pages:
            found.append("pages")
        if max(map(pages.references, range(pages.num_pages))) > 1:
            found.append("references")
    return found

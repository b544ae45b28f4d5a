"""Memory for many requests at once, before the first one: an engine that never idles cannot grow."""

from __future__ import annotations

import torch

from herald import hardware
from herald.engine.engine import Engine
from herald.engine.memory_needs import memory_needs
from herald.engine.request import Request
from herald.errors import ResidentSetTooSmall
from herald.sampling_params import SamplingParams

# Shares of what is free that are taken where the user names no number.
HOST_SHARE = 0.5
DEVICE_SHARE = 0.8
# Block length of canvases whose checkpoint names none, as on LLaDA's model cards.
USUAL_BLOCK = 32
# Tokens of a canvas whose rows are reserved.
CANVAS_TOKENS = 512


def reserve(engine: Engine, tokens: int | None) -> int:
    """Allocate host pool and resident sets for prompt and output tokens of requests of the longest length.

    Args:
        engine: has no requests.
        tokens: over all requests; None for those of ``max_num_seqs``, as far as half of the free host memory
            and most of the device's hold them.

    Returns:
        Tokens that were reserved, in whole requests.

    Raises:
        HostPoolTooSmall, ResidentSetTooSmall: the machine has no room.
    """
    automatic = tokens is None
    if tokens is None:
        tokens = min(engine.config.max_num_seqs * engine.max_model_len, _room(engine))
    longest = min(engine.max_model_len, max(tokens, 2 * (engine.model.config.block_length or USUAL_BLOCK)))
    count = min(max(tokens // longest, 1), engine.config.max_num_seqs)
    while True:
        try:
            _allocate(engine, count, longest)
            return count * longest
        except ResidentSetTooSmall:
            if not automatic or count == 1:
                raise
            count //= 2


def _room(engine: Engine) -> int:
    """Tokens that fit into the share of the memory that a server may take."""
    offload, token_bytes = engine.offload, engine.memory.layout.token_bytes
    if offload.enabled and offload.host_memory_bytes:
        return offload.host_memory_bytes // token_bytes
    if offload.enabled or engine.model.device.type == "cpu":
        return int(hardware.memory().free * HOST_SHARE) // token_bytes
    free, _ = torch.cuda.mem_get_info(engine.model.device)
    return int(free * DEVICE_SHARE) // token_bytes


def _allocate(engine: Engine, count: int, positions: int) -> None:
    """Room for ``count`` requests of ``positions`` tokens, however these are prompt and output."""
    needs = [memory_needs([sample], engine.prefixes)[0] for sample in _samples(engine, positions)]
    rows, pages = max(need.arena_rows for need in needs), max(need.pages for need in needs)
    engine.memory.ensure(rows * count, pages * count, requests=count)
    engine.memory.arena.unit = 0 if engine.model.config.full_attention else rows
    engine.connect()


def _samples(engine: Engine, positions: int) -> list[Request]:
    """Requests of ``positions`` tokens, of which one needs the most of each kind of memory.

    A long output may have more rows arrive at once than a long prompt, and short blocks leave a longer prefix
    before the last one. On a canvas what is kept depends on what is asked for: some hundred tokens, with a
    cache, stand for the rest.
    """
    config = engine.model.config
    usual = config.block_length or USUAL_BLOCK
    whole = max(positions // usual * usual, 1)
    if config.full_attention:
        output = max(min(whole // 4, CANVAS_TOKENS), 1)
        shapes = [SamplingParams(max_tokens=output, cache="dual")]
    else:
        most = max(whole - usual, 1)
        sizes = ((min(usual, positions - 1), usual), (most, usual), (most, 1))
        shapes = [SamplingParams(max_tokens=output, block_length=block) for output, block in sizes]
    return [engine.new_request([0] * max(whole - params.max_tokens, 1), params) for params in shapes]


def grow_pool(engine: Engine, pages: int) -> None:
    """Grow an idle engine's pool so that ``pages`` fit beside those that stay."""
    if not engine.scheduler.running:
        if engine.retriever is not None:
            engine.retriever.drain()
        try:
            engine.memory.ensure(0, engine.prefixes.kept([]) + pages)
        finally:
            engine.connect()  # the old pool may be gone all the same

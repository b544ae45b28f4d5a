"""Memory for many requests at once, before the first one: an engine that never idles cannot grow."""

from __future__ import annotations

import torch

from herald import hardware
from herald.engine.engine import Engine
from herald.engine.memory_needs import memory_needs
from herald.errors import ResidentSetTooSmall
from herald.sampling_params import SamplingParams

# Shares of what is free that are taken where the user names no number.
HOST_SHARE = 0.5
DEVICE_SHARE = 0.8


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
    longest = min(engine.max_model_len, max(tokens, 2 * engine.model.config.block_length))
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
    """Room for ``count`` requests of ``positions`` tokens."""
    block = engine.model.config.block_length
    params = SamplingParams(max_tokens=min(block, positions - 1), ignore_eos=True)
    sample = engine.new_request([0] * (positions // block * block - params.max_tokens), params)
    need = memory_needs([sample], engine.prefixes)[0]
    engine.memory.ensure(need.arena_rows * count, need.pages * count, requests=count)
    engine.connect()


def grow_pool(engine: Engine, pages: int) -> None:
    """Grow an idle engine's pool so that ``pages`` fit beside those that stay."""
    if not engine.scheduler.running:
        if engine.retriever is not None:
            engine.retriever.drain()
        engine.memory.ensure(0, engine.prefixes.kept([]) + pages)
        engine.connect()

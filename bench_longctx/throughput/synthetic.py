"""Requests in the middle of their decoding, on random weights and KV: nothing is downloaded or prefilled."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from bench_longctx.make_checkpoint import WEIGHT_STD
from herald.config import EngineConfig, OffloadConfig
from herald.engine import engine as engine_module
from herald.engine.engine import Engine
from herald.engine.memory import HostStore
from herald.engine.prefill import FirstScores, RowStore
from herald.engine.resident import ResidentSet
from herald.engine.runner import LaneRunner
from herald.models import BlockModel
from herald.models.presets import PRESETS
from herald.models.registry import family_named
from herald.models.weights import Parameter

# Rows of this norm, against 1 for the others, are chosen whatever the queries: they are what consecutive
# blocks share.
HEAVY = 16.0
# Distinct pages; a longer prefix, and every further request, repeats them.
FILLED_PAGES = 512


TINY = {
    "num_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "mask_token_id": 511,
    "eos_token_ids": (510,),
    "bos_token_id": None,
    "pad_token_id": 510,
}
TINY_EXPERTS = {
    "num_experts": 16,
    "experts_per_token": 4,
    "intermediate_size": 64,
    "num_groups": 4,
    "top_groups": 2,
}


def random_model(
    preset: str, block_length: int, max_positions: int, device: torch.device, tiny: bool = False
) -> BlockModel:
    """A model of the preset's shape, or a very small one, with normal weights."""
    shape = dataclasses.replace(
        PRESETS[preset], block_length=block_length, max_position_embeddings=max_positions
    )
    if tiny:
        shape = dataclasses.replace(shape, **TINY)
    if tiny and shape.moe is not None:
        shape = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, **TINY_EXPERTS))
    model_class = family_named(shape.family).model_class()
    generator = torch.Generator(device).manual_seed(0)

    def make(parameter: Parameter) -> torch.Tensor:
        if all(source.name.endswith(("norm.weight", "ln_f.weight")) for source in parameter.sources):
            return torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
        # also of parameters that would stay float32: what is stored as bfloat16 is all that they hold
        empty = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        made = empty.normal_(0.0, WEIGHT_STD, generator=generator)
        return made if parameter.dtype is None else made.to(parameter.dtype)

    return model_class(shape, {p.name: make(p) for p in model_class.parameters(shape)})


class NoTokenizer:
    """Prompts are token ids."""

    available = False


class SyntheticPrefill:
    """Takes the place of `PrefillTask`: a random first set, random logits, no work.

    Its rows are noise, whatever positions they are said to hold: how long a step takes does not depend
    on their values.
    """

    done = False
    progress = 0
    next_unit = (0, 1)

    def __init__(
        self,
        runner: LaneRunner,
        resident: ResidentSet,
        prefix_tokens: torch.Tensor,
        block_tokens: torch.Tensor,
        masked: torch.Tensor,
        chunk: int,
        row_store: RowStore | None,
        scores: FirstScores,
    ) -> None:
        del masked, chunk, scores
        self.model = runner.model
        self.resident = resident
        self.prefix = prefix_tokens.numel()
        self.offloaded = row_store is not None
        self.logits: torch.Tensor | None = None
        self._block = block_tokens.numel()

    def run_unit(self) -> None:
        config, resident = self.model.config, self.resident
        for layer in range(config.num_layers):
            resident.layer_view(layer).normal_()
        if not self.offloaded:
            resident.mark_dense(self.prefix)
        else:
            size = resident.size_for(self.prefix)
            rng = np.random.default_rng(0)
            chosen = np.sort(rng.choice(self.prefix, size, replace=False)).astype(np.int32)
            shape = (config.num_layers, config.num_kv_heads, size)
            resident.adopt(torch.from_numpy(np.broadcast_to(chosen, shape).copy()), self.prefix)
        shape = (self._block, config.vocab_size)
        self.logits = torch.randn(shape, dtype=self.model.dtype, device=self.model.device)
        self.done = True

    def close(self) -> None:
        """Nothing to let go of."""


def make_engine(model: BlockModel, offload: OffloadConfig, max_num_seqs: int, shared_share: float) -> Engine:
    """An engine whose requests begin decoding at once, with a filled pool or arena.

    Args:
        shared_share: share of a selection that the next block's selection keeps.
    """
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=model.config.max_positions)
    offload = dataclasses.replace(offload, prefix_sharing=False)  # pages hold noise, not prompts
    engine = Engine(model, NoTokenizer(), offload, config, seed=0)  # type: ignore[arg-type]
    engine.on_retriever = lambda retriever, store: fill_store(store, offload.kv_budget * shared_share)
    return engine


def begin_without_prefill() -> None:
    """From now on requests of this process skip their prefill."""
    engine_module.PrefillTask = SyntheticPrefill  # type: ignore[misc, assignment]


def fill_store(store: HostStore, heavy_share: float) -> None:
    """Fill pool and key index: normal keys and values, ``heavy_share`` of the rows with heavy keys."""
    layout, rows = store.layout, store.pool.rows
    num_pages = store.pool.num_pages
    base_pages = min(FILLED_PAGES, num_pages)
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(base_pages, *rows.shape[2:], generator=generator)
    heavy = torch.rand(base.shape[:3], generator=generator) < heavy_share
    base[..., : layout.head_dim] *= torch.where(heavy, HEAVY, 1.0).unsqueeze(-1)
    base = base.to(rows.dtype)
    for layer in range(layout.num_layers):
        for first in range(0, num_pages, base_pages):
            count = min(base_pages, num_pages - first)
            rows[layer, first : first + count].copy_(base[:count])
    index = store.index
    pages = np.arange(base_pages, dtype=np.int32)
    with ThreadPoolExecutor(store.num_threads) as pool:
        index.append_span(pages, 0, base_pages * layout.page_size, executor=pool)

        def repeat(layer: int) -> None:
            for array in (whole[layer] for whole in index.arrays):
                for first in range(base_pages, num_pages, base_pages):
                    count = min(base_pages, num_pages - first)
                    array[first : first + count] = array[:count]

        list(pool.map(repeat, range(layout.num_layers)))

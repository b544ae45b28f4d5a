"""The engine of a model."""

from __future__ import annotations

from herald.config import EngineConfig, OffloadConfig
from herald.engine.canvas import CanvasEngine
from herald.engine.engine import Engine
from herald.models import BlockModel
from herald.tokenizer import Tokenizer


def make_engine(
    model: BlockModel,
    tokenizer: Tokenizer,
    offload: OffloadConfig,
    config: EngineConfig,
    seed: int | None = None,
    poison: bool = False,
) -> Engine:
    """An `Engine`, or for a family with full attention a `CanvasEngine`; arguments as there."""
    kind = CanvasEngine if model.config.full_attention else Engine
    return kind(model, tokenizer, offload, config, seed, poison)

"""Engines on checkpoints of `tests.support.golden`, for fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.tokenizer import Tokenizer
from tests.support.golden import GOLDEN, golden_model

MakeGolden = Callable[..., Engine]


def golden_engines(device: str = "cpu") -> Iterator[MakeGolden]:
    """Body of a fixture: ``make(folder, offload, dtype, **limits)``, whose engines are closed in the end."""
    engines: list[Engine] = []

    def make(
        folder: str, offload: OffloadConfig, dtype: torch.dtype = torch.float32, **limits: int
    ) -> Engine:
        model, tokenizer = golden_model(folder, device, dtype), Tokenizer(GOLDEN / folder)
        engine = Engine(model, tokenizer, offload, EngineConfig(**limits), seed=0, poison=True)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()

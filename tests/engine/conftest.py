"""Engines on the small golden checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.models import load_model
from herald.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
DENSE = OffloadConfig(enabled=False)

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """``make_engine(folder, offload, **limits)``: engines that are closed after the test."""
    engines: list[Engine] = []

    def make(
        folder: str = "sdar_b8", offload: OffloadConfig = DENSE, poison: bool = True, **limits: int
    ) -> Engine:
        path = GOLDEN / folder
        model = load_model(path, torch.device("cpu"), torch.float32)
        engine = Engine(model, Tokenizer(path), offload, EngineConfig(**limits), seed=0, poison=poison)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()

"""Engines on the small golden checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from herald.config import EngineConfig, OffloadConfig
from herald.engine.canvas import CanvasEngine
from herald.engine.engine import Engine
from herald.engine.factory import make_engine as engine_of
from herald.models import load_model
from herald.tokenizer import Tokenizer
from tests.support.golden import full_model

GOLDEN = Path(__file__).parents[1] / "golden"
DENSE = OffloadConfig(enabled=False)

MakeEngine = Callable[..., Engine]
MakeCanvas = Callable[..., CanvasEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """``make_engine(folder, offload, **limits)``: engines that are closed after the test."""
    engines: list[Engine] = []

    def make(
        folder: str = "sdar_b8",
        offload: OffloadConfig = DENSE,
        poison: bool = True,
        mask_token_id: int | None = None,
        **limits: int,
    ) -> Engine:
        path = GOLDEN / folder
        model = load_model(path, torch.device("cpu"), torch.float32, mask_token_id=mask_token_id)
        engine = Engine(model, Tokenizer(path), offload, EngineConfig(**limits), seed=0, poison=poison)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_canvas() -> Iterator[MakeCanvas]:
    """``make_canvas(folder, offload, **limits)``: engines of full attention, closed after the test."""
    engines: list[CanvasEngine] = []

    def make(folder: str, offload: OffloadConfig = DENSE, **limits: int) -> CanvasEngine:
        tokenizer, config = Tokenizer(GOLDEN / folder), EngineConfig(**limits)
        engine = engine_of(full_model(folder), tokenizer, offload, config, seed=0, poison=True)
        assert isinstance(engine, CanvasEngine)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()

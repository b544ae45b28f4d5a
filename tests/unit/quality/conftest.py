"""Shared by the tests of the quality suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_longctx.tasks.forms import TokensForm
from bench_longctx.tasks.haystack import Haystack
from herald.tokenizer import Tokenizer
from tests.engine.conftest import make_engine

TINY = Path(__file__).parents[3] / "herald" / "models" / "tiny_weights"

__all__ = ["make_engine"]


@pytest.fixture(scope="session")
def haystack() -> Haystack:
    return Haystack.load()


@pytest.fixture(scope="session")
def tokens() -> TokensForm:
    """Tokens of the bundled model's tokenizer, with its chat template."""
    return TokensForm(Tokenizer(TINY))

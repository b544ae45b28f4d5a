"""A server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve.support import Running, serving


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The shared server; a test leaves it idle."""
    yield shared
    shared.wait_idle()
    assert shared.get("/health") == (200, {"status": "ok"})


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made

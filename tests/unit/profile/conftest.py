"""A run of three blocks in round numbers."""

from __future__ import annotations

import pytest

from herald.engine.trace import Span


def block_spans(block: int, start: float, request_id: str = "a", seconds: float = 1.0) -> list[Span]:
    """Three steps of ``seconds``; in the second one the next block's rows are chosen and begin to travel."""
    step = [start + i * seconds for i in range(4)]
    return [
        Span("forward", step[0], step[1], request_id, block, 0, lanes=2),
        Span("forward", step[1], step[2], request_id, block, 1, lanes=3, lookahead=True),
        Span("forward", step[2], step[3], request_id, block, 2, lanes=1),
        Span("write_back", step[1], step[1] + 0.1, request_id, block - 1, bytes=500),
        Span("index", step[1] + 0.1, step[1] + 0.2, request_id, block - 1),
        Span("selection", step[1] + 0.5, step[1] + 0.9, request_id, block + 1, rows=10, bytes=4_000_000_000),
        Span("transfer", step[1] + 0.9, step[1] + 1.1, request_id, block + 1, rows=4, bytes=400),
    ]


@pytest.fixture
def spans() -> list[Span]:
    """Prefill 0 to 2; blocks 5, 6 and 7 of three seconds each from 2, a wait of a quarter before the last."""
    return [
        Span("prefill", 0.0, 2.0, "a"),
        *block_spans(5, 2.0),
        Span("wait", 5.0, 5.0, "a", 6),
        *block_spans(6, 5.0),
        Span("wait", 8.0, 8.25, "a", 7),
        *block_spans(7, 8.25),
    ]

from __future__ import annotations

from pathlib import Path

import pytest

from herald.engine.trace import Span
from herald.profile.timeline import can_draw, draw_timeline, middle_blocks

needs_matplotlib = pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")


def steps(request_id: str, blocks: range) -> list[Span]:
    return [Span("forward", block, block + 1.0, request_id, block, 0) for block in blocks]


@pytest.mark.parametrize(
    ("blocks", "count", "expected"),
    [
        (range(10, 20), 4, [13, 14, 15, 16]),
        (range(10, 17), 3, [12, 13, 14]),
        (range(5, 7), 3, [5, 6]),
        (range(5, 6), 1, [5]),
        (range(0), 3, []),
    ],
)
def test_blocks_from_the_middle(blocks: range, count: int, expected: list[int]) -> None:
    assert middle_blocks(steps("a", blocks), count)[1] == expected


def test_the_request_with_most_blocks() -> None:
    spans = [*steps("short", range(2)), *steps("long", range(3)), *steps("other", range(3))]
    assert middle_blocks(spans, 3) == ("long", [0, 1, 2])


@needs_matplotlib
def test_a_picture(spans: list[Span], tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    assert draw_timeline(path, spans)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@needs_matplotlib
def test_nothing_to_draw(tmp_path: Path) -> None:
    assert not draw_timeline(tmp_path / "timeline.png", [Span("prefill", 0.0, 1.0, "a")])
    assert not list(tmp_path.iterdir())

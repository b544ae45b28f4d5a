from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from herald.engine.trace import Span
from herald.profile.summary import block_times, overlap, summarise


def test_seconds_of_a_block(spans: list[Span]) -> None:
    blocks = block_times(spans)
    assert [(block.block, block.steps) for block in blocks] == [(5, 3), (6, 3), (7, 3)]
    first, _, last = (asdict(block) for block in blocks)
    assert first["denoise_seconds"] == pytest.approx(3.0)
    assert first["selection_seconds"] == first["transfer_seconds"] == first["exposed_seconds"] == 0
    assert last["selection_seconds"] == pytest.approx(0.4)
    assert last["transfer_seconds"] == pytest.approx(0.2)
    assert last["exposed_seconds"] == pytest.approx(0.25)


def test_the_whole_run(spans: list[Span]) -> None:
    summary = summarise(spans, row_bytes=100, resident_bytes=7000)
    assert summary.decode_seconds == pytest.approx(9.25)
    assert summary.compute_busy_share == pytest.approx(9 / 9.25)
    assert (summary.forwards, summary.forwards_per_step) == (9, 1.0)
    assert summary.overlap.prefill_seconds == pytest.approx(2.0)
    assert summary.overlap.overlap_ratio == pytest.approx(1.0)
    assert summary.bytes_moved == 3 * 400
    assert summary.bytes_kept == 3 * (10 - 4) * 100
    assert summary.bytes_written_back == 3 * 500
    assert summary.resident_bytes == 7000
    assert summary.selection_gb_per_second == pytest.approx(4 / 0.4)
    assert summary.copy_gb_per_second == pytest.approx(400e-9 / 0.2)
    assert summary.write_back_gb_per_second == pytest.approx(500e-9 / 0.1)
    assert summary.median["denoise_seconds"] == pytest.approx(3.0)
    assert summary.median["selection_seconds"] == pytest.approx(0.4)
    assert summary.median["exposed_seconds"] == 0
    assert json.loads(json.dumps(summary.as_json()))["blocks"][1]["block"] == 6


def test_overlap_counts_each_moment_once() -> None:
    times = overlap(
        [
            Span("forward", 0.0, 2.0, "a", 1, 0),
            Span("forward", 0.0, 2.0, "b", 1, 0),  # the same forward
            Span("selection", 1.0, 2.5, "a", 2),
            Span("transfer", 2.0, 3.0, "b", 2),  # half a second beside the selection
            Span("forward", 2.75, 4.0, "a", 1, 1),
        ]
    )
    assert times.forward_seconds == pytest.approx(3.25)
    assert times.selection_and_transfer_seconds == pytest.approx(2.0)
    assert times.under_denoising_seconds == pytest.approx(1.25)
    assert times.overlap_ratio == pytest.approx(1.25 / 2.0)


def test_a_boundary_forward_is_exposed_and_no_step() -> None:
    summary = summarise(
        [
            Span("wait", 0.0, 3.0, "a", 3),
            Span("forward", 0.0, 1.0, "a", 3, lanes=2),
            Span("selection", 1.0, 2.5, "a", 3, bytes=1),
            Span("wait", 3.0, 3.5, "a", 3),
            Span("forward", 3.5, 4.5, "a", 3, 0, lanes=2),
        ],
        row_bytes=1,
        resident_bytes=0,
    )
    (block,) = summary.blocks
    assert (block.steps, block.denoise_seconds, block.exposed_seconds) == (1, 1.0, 3.5)
    assert (summary.forwards, summary.forwards_per_step) == (2, 2.0)
    assert summary.overlap.under_denoising_seconds == 0
    assert summary.compute_busy_share == pytest.approx(2 / 4.5)


def test_requests_in_one_batch() -> None:
    """A shared forward is one forward, and counts in full for the block of each request."""
    spans = [Span("forward", i, i + 1.0, name, 2, i, lanes=1) for i in range(4) for name in "ab"]
    spans.append(Span("prefill", 4.0, 6.0, "c"))  # between two steps: no part of the decode wall
    spans.append(Span("forward", 6.0, 7.0, "a", 2, 4))
    summary = summarise(spans, row_bytes=1, resident_bytes=0)
    assert [block.denoise_seconds for block in summary.blocks] == [5.0, 4.0]
    assert (summary.forwards, summary.forwards_per_step) == (5, 1.0)
    assert summary.decode_seconds == pytest.approx(5.0)
    assert summary.compute_busy_share == pytest.approx(1.0)


def test_nothing_recorded() -> None:
    summary = summarise([], row_bytes=1, resident_bytes=0)
    assert summary.blocks == () and summary.decode_seconds == 0 and summary.compute_busy_share == 0
    assert set(summary.median.values()) == {0.0}

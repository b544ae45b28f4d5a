"""The spans of a run say what its counters say."""

from __future__ import annotations

import pytest

from herald.config import OffloadConfig
from herald.engine.trace import ForwardPart, Span, Trace, busy_seconds
from herald.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.support import random_prompt, run


@pytest.mark.parametrize("lookahead_step", [1, 4])  # 4 never comes: every selection is made at a boundary
def test_spans_and_counters_agree(make_engine: MakeEngine, lookahead_step: int) -> None:
    offload = OffloadConfig(
        kv_budget=0.2, min_resident_rows=16, recent_rows=16, lookahead_step=lookahead_step, num_threads=2
    )
    engine = make_engine("sdar_b8", offload, tokens_per_step=4096)  # the prompt is one chunk
    params = SamplingParams(max_tokens=40, ignore_eos=True, confidence_threshold=None, denoising_steps=3)
    (request,) = run(engine, [random_prompt(400, 1)], params)
    assert engine.retriever is not None
    engine.retriever.drain()
    spans, counters = engine.trace.spans(), request.counters
    forwards = [span for span in spans if span.kind == "forward"]
    # Step 0 of the first of five blocks, 50 to 54, runs in prefill.
    assert len(forwards) == counters.forwards - 1
    steps = [(span.block, span.step) for span in forwards if span.step >= 0]
    assert steps == [(block, step) for block in range(50, 55) for step in range(3)][1:]
    boundary = lookahead_step > 1
    assert sum(span.step < 0 for span in forwards) == counters.boundary_selections == 4 * boundary
    assert sum(span.lookahead for span in forwards) == counters.lookaheads == 4 * (not boundary)
    for span in forwards:  # a finished block's final lane, the block, draft and next block
        final = span.block > 50 and span.step == 0
        assert span.lanes == (2 if span.step < 0 else 1 + final + 2 * span.lookahead)
    assert busy_seconds(spans, {"wait"}) == pytest.approx(counters.exposed_seconds, abs=1e-6)
    transfers = [span for span in spans if span.kind == "transfer"]
    assert sum(span.bytes for span in transfers) == counters.bytes_moved > 0
    assert sum(span.rows for span in transfers) == counters.rows_moved
    layout = engine.memory.layout
    written = [(span.block, span.bytes) for span in spans if span.kind == "write_back"]
    prompt = layout.num_layers * [(-1, 400 * layout.token_bytes // layout.num_layers)]
    assert written == prompt + [(block, 8 * layout.token_bytes) for block in range(50, 54)]
    assert [span.block for span in spans if span.kind == "index"] == [block for block, _ in written]
    selections = [span for span in spans if span.kind == "selection"]
    assert [span.block for span in selections] == [51, 52, 53, 54]
    assert all(span.bytes > 0 and span.rows > 0 for span in selections)


def test_the_oldest_spans_make_room() -> None:
    """Forwards count with all their spans, which are made when somebody asks."""
    trace = Trace(capacity=40)
    added: list[Span] = []
    for number in range(200):
        count = (0, 1, 7)[number % 3]
        parts = [ForwardPart(f"r{i}", number, i, 1 + i, i == 2) for i in range(count)]
        trace.add_forward(number, number + 0.5, parts)
        trace.add(Span("index", number, number + 0.25, "r0", number))
        added += [Span("forward", number, number + 0.5, *part) for part in parts]
        added.append(Span("index", number, number + 0.25, "r0", number))
        spans = trace.spans()
        assert spans == added[-len(spans) :]
        assert len(spans) == len(added) if len(added) <= 40 else 28 <= len(spans) <= 40
    trace.clear()
    assert trace.spans() == []
    trace.add_forward(0.0, 1.0, [ForwardPart("r", 0, 0, 1, False)] * 60)
    assert len(trace.spans()) == 60  # the newest forward stays whole

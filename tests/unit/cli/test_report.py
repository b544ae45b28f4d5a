from __future__ import annotations

import json

import pytest

from herald.cli.report import add_up, exposed_share, json_object, print_statistics, statistics
from herald.doctor.units import format_bytes, format_seconds
from herald.outputs import CompletionOutput, RequestMetrics, RequestOutput

METRICS = RequestMetrics(
    prompt_tokens=8830,
    output_tokens=20,
    blocks=2,
    steps=9,
    decode_seconds=0.5,
    exposed_seconds=0.1,
    rows_moved=12345,
)


def test_json_object_holds_the_documented_keys() -> None:
    output = RequestOutput(
        "r", (1, 2, 3), (CompletionOutput("a\nb", (7, 8), "length"),), True, metrics=METRICS
    )
    value = json.loads(json.dumps(json_object(output)))
    assert {key: value[key] for key in value if key != "metrics"} == {
        "text": "a\nb",
        "token_ids": [7, 8],
        "finish_reason": "length",
        "prompt_tokens": 3,
    }
    assert value["metrics"]["rows_moved"] == 12345
    assert value["metrics"]["steps_per_block"] == 4.5
    assert value["metrics"]["tokens_per_second"] == 40.0


def test_sums_keep_rates_right() -> None:
    total = add_up([METRICS, RequestMetrics(blocks=2, steps=1, output_tokens=10, decode_seconds=0.5)])
    assert (total.blocks, total.steps, total.steps_per_block, total.tokens_per_second) == (4, 10, 2.5, 30.0)


def test_exposed_share() -> None:
    assert exposed_share(METRICS) == pytest.approx(0.2)
    assert exposed_share(RequestMetrics()) == 0.0


def test_statistics_of_nothing_do_not_divide_by_zero() -> None:
    assert dict(statistics(RequestMetrics()))["tokens/s"] == "-"


def test_no_rate_for_what_prefill_decoded() -> None:
    """One step, which prefill ran: the time after it is no decoding."""
    answered = RequestMetrics(blocks=1, steps=1, output_tokens=8, decode_seconds=2e-4)
    assert answered.tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("count", "shown", "absent"),
    [
        (1, ["8,830"], ["prompt 1", "all"]),
        (3, ["prompt 3"], ["all 3"]),
        (5, ["all 5 prompts", "44,150"], ["prompt 5"]),
    ],
)
def test_table_columns(
    count: int, shown: list[str], absent: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_statistics([METRICS] * count)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "exposed time" in captured.err
    assert all(text in captured.err for text in shown)
    assert not any(text in captured.err for text in absent)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (1000 * 1024, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5.0 PiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 s"), (0.00123, "1.23 ms"), (0.9994, "999 ms"), (0.9999, "1.00 s"), (61.5, "61.50 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

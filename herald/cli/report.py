"""What ``herald generate`` prints about a finished request: JSON object or statistics table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from herald.doctor.units import format_bytes, format_seconds
from herald.outputs import RequestMetrics, RequestOutput

MAX_COLUMNS = 4


def json_object(output: RequestOutput) -> dict[str, Any]:
    """The object that ``--json`` prints for one prompt."""
    first = output.outputs[0]
    metrics = asdict(output.metrics)
    metrics["steps_per_block"] = output.metrics.steps_per_block
    metrics["tokens_per_second"] = output.metrics.tokens_per_second
    return {
        "text": first.text,
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "metrics": metrics,
    }


def add_up(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """Field-wise sum; the rates of the sum are means weighted by blocks and by time."""
    return RequestMetrics(
        **{field.name: sum(getattr(each, field.name) for each in metrics) for field in fields(RequestMetrics)}
    )


def exposed_share(metrics: RequestMetrics) -> float:
    """Part of the decoding time spent waiting for a selection or a transfer, in [0, 1]."""
    return metrics.exposed_seconds / metrics.decode_seconds if metrics.decode_seconds > 0 else 0.0


def statistics(metrics: RequestMetrics) -> list[tuple[str, str]]:
    """Label and value of each line of the table."""
    return [
        ("prompt tokens", f"{metrics.prompt_tokens:,}"),
        ("cached tokens", f"{metrics.cached_tokens:,}"),
        ("output tokens", f"{metrics.output_tokens:,}"),
        ("blocks", f"{metrics.blocks:,}"),
        ("steps per block", f"{metrics.steps_per_block:.2f}"),
        ("tokens/s", f"{metrics.tokens_per_second:.1f}" if metrics.tokens_per_second else "-"),
        ("prefill", format_seconds(metrics.prefill_seconds)),
        ("decode", format_seconds(metrics.decode_seconds)),
        ("host KV", format_bytes(metrics.host_kv_bytes)),
        ("resident set", format_bytes(metrics.resident_bytes)),
        ("rows selected", f"{metrics.rows_selected:,}"),
        ("rows moved", f"{metrics.rows_moved:,}"),
        ("bytes moved", format_bytes(metrics.bytes_moved)),
        ("exposed time", f"{format_seconds(metrics.exposed_seconds)} ({exposed_share(metrics):.1%})"),
    ]


def print_statistics(metrics: Sequence[RequestMetrics]) -> None:
    """The table on standard error: a column a prompt, or one column of sums for more than a few."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    columns = [(f"prompt {number}", each) for number, each in enumerate(metrics, 1)]
    if len(columns) == 1:
        columns = [("", columns[0][1])]
    elif len(columns) > MAX_COLUMNS:
        columns = [(f"all {len(metrics)} prompts", add_up(metrics))]
    table = Table(box=SIMPLE, show_header=len(metrics) > 1, pad_edge=False)
    table.add_column("")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for rows in zip(*(statistics(each) for _, each in columns)):
        table.add_row(rows[0][0], *(value for _, value in rows))
    Console(stderr=True, highlight=False).print(table)

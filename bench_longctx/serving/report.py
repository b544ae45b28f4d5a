"""What a report of GuideLLM says, in a few numbers a rate, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PERCENTILES = ("p50", "p90", "p99")


def summary(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a rate, slowest first. Times in seconds, of requests that succeeded."""
    return sorted((_row(benchmark) for benchmark in report["benchmarks"]), key=lambda row: row["rate"])


def _row(benchmark: dict[str, Any]) -> dict[str, Any]:
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]

    def times(name: str, scale: float) -> dict[str, float]:
        found = metrics[name]["successful"]
        return {
            "mean": found["mean"] * scale,
            **{each: found["percentiles"][each] * scale for each in PERCENTILES},
        }

    return {
        "rate": float(benchmark["config"]["strategy"].get("rate") or 0.0),
        "requests": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "requests_per_second": metrics["requests_per_second"]["successful"]["mean"],
        "output_tokens_per_second": metrics["output_tokens_per_second"]["total"]["mean"],
        "concurrency": metrics["request_concurrency"]["total"]["mean"],
        "latency_seconds": times("request_latency", 1.0),
        "first_block_seconds": times("time_to_first_output_token_ms", 1e-3),
        "per_output_token_seconds": times("time_per_output_token_ms", 1e-3),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Latency and throughput against the rate of requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    rates = [row["rate"] for row in rows]
    for axis, (name, title) in zip(
        axes,
        (
            ("first_block_seconds", "time to the first block, s"),
            ("latency_seconds", "latency, s"),
            ("per_output_token_seconds", "time per output token, s"),
        ),
    ):
        for percentile in PERCENTILES:
            axis.plot(rates, [row[name][percentile] for row in rows], marker="o", label=percentile)
        axis.set(title=title, xlabel="requests sent a second", ylim=(0, None))
        axis.legend()
    axes[3].plot(rates, [row["output_tokens_per_second"] for row in rows], marker="o", color="black")
    axes[3].set(title="output tokens a second", xlabel="requests sent a second", ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

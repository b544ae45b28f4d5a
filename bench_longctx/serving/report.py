"""What reports of GuideLLM say, in a few numbers a rate, and as a picture.

    python -m bench_longctx.serving.report --json all.json --plot all.png a=a/summary.json b=b/summary.json
    python -m bench_longctx.serving.report --json all.json --plot all.png

The first puts runs side by side, each under its name; the second draws again what the file has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PERCENTILES = ("p50", "p90", "p99")
STYLES = {"p50": "-", "p90": "--", "p99": ":"}
TIMES = {
    "first_block_seconds": "time to the first block, s",
    "latency_seconds": "time to the end, s",
    "per_output_token_seconds": "time per output token, s",
}


def summary(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a rate, slowest first.

    Times are in seconds and of requests that succeeded, ``None`` where none did; ``sent_per_second``
    is the rate at which requests left, ``cached_share`` is the part
    of their prompts that the server says it had already (``None`` if it does not say), ``first_error`` what
    happened to the first request that failed, ``behind_schedule_seconds`` the p90 of how late they were sent.
    """
    return sorted((_row(benchmark) for benchmark in report["benchmarks"]), key=lambda row: row["rate"])


def _row(benchmark: dict[str, Any]) -> dict[str, Any]:
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    good, errored = (benchmark["requests"][name] or [] for name in ("successful", "errored"))

    def times(name: str, scale: float) -> dict[str, float | None]:
        # The spread of no values is reported as zeros, which are the best of latencies.
        found = metrics[name]["successful"] if totals["successful"] else None
        values = {"mean": found["mean"], **found["percentiles"]} if found else {}
        return {each: values[each] * scale if found else None for each in ("mean", *PERCENTILES)}

    starts = [each["request_start_time"] for each in good + errored]
    seconds = max(starts) - min(starts) if starts else 0.0
    said = [each for each in good if each.get("cached_tokens") is not None]
    prompts = sum(each["prompt_tokens"] for each in said)
    return {
        "rate": float(benchmark["config"]["strategy"].get("rate") or 0.0),
        # A few requests of a Poisson process may come at another rate than it has.
        "sent_per_second": (len(starts) - 1) / seconds if seconds else None,
        "requests": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "first_error": errored[0]["info"]["error"] if errored else None,
        "cached_share": sum(each["cached_tokens"] for each in said) / prompts if prompts else None,
        "behind_schedule_seconds": metrics["request_dispatch_delay"]["total"]["percentiles"]["p90"],
        "requests_per_second": metrics["requests_per_second"]["successful"]["mean"],
        "output_tokens_per_second": metrics["output_tokens_per_second"]["total"]["mean"],
        "concurrency": metrics["request_concurrency"]["total"]["mean"],
        "latency_seconds": times("request_latency", 1.0),
        "first_block_seconds": times("time_to_first_output_token_ms", 1e-3),
        "per_output_token_seconds": times("time_per_output_token_ms", 1e-3),
    }


def _sent(row: dict[str, Any]) -> float:
    sent: float | None = row["sent_per_second"]
    return row["rate"] if sent is None else sent


def line(row: dict[str, Any]) -> str:
    """A row of ``summary``, for a terminal."""
    first, latency, cached = row["first_block_seconds"], row["latency_seconds"], row["cached_share"]
    parts = [
        f"{row['rate']:>6.2f}/s asked for",
        f"{_sent(row):.2f}/s sent",
        f"{row['requests_per_second']:.2f}/s answered",
    ]
    if row["requests"]:
        parts += [
            f"{row['output_tokens_per_second']:.1f} tokens/s",
            *(
                f"{name} p50 {spread['p50']:.2f} s p99 {spread['p99']:.2f} s"
                for name, spread in (("first block", first), ("latency", latency))
            ),
        ]
    if cached is not None:
        parts.append(f"{cached:.0%} of the prompts cached")
    parts.append(f"{row['failed']} failed" + (f": {row['first_error']}" if row["first_error"] else ""))
    return ", ".join(parts)


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Latency and throughput against the rate at which requests were sent, of one or several runs.

    One run has all percentiles; several have a colour each, and p50 and p90. Rates at which no request
    succeeded have no point.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    shown = PERCENTILES if len(runs) == 1 else PERCENTILES[:2]
    for number, (name, rows) in enumerate(runs.items()):
        rows = sorted(rows, key=_sent)
        rates = [_sent(row) for row in rows]
        for axis, key in zip(axes, TIMES):
            for place, percentile in enumerate(shown):
                colour = f"C{number if len(runs) > 1 else place}"
                values = [row[key][percentile] for row in rows]
                values = [float("nan") if value is None else value for value in values]
                label = percentile if len(runs) == 1 else f"{name}, {percentile}"
                style = STYLES[percentile]
                axis.plot(rates, values, style, marker="o", color=colour, label=label)
        throughput = [row["output_tokens_per_second"] for row in rows]
        axes[3].plot(rates, throughput, marker="o", color=f"C{number}", label=name)
    for axis, title in zip(axes, (*TIMES.values(), "output tokens a second")):
        axis.set(title=title, xlabel="requests sent a second", xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        if axis is not axes[3] or len(runs) > 1:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="NAME=SUMMARY", help="runs to write to --json")
    parser.add_argument("--json", type=Path, required=True, help="the runs, by name")
    parser.add_argument("--plot", type=Path, required=True, help="the picture")
    args = parser.parse_args()
    if args.runs:
        named = [each.partition("=") for each in args.runs]
        if wrong := [name for name, _, path in named if not (name and path)]:
            parser.error(f"a run needs a name and a file, such as shared=load/summary.json, not {wrong[0]!r}")
        whole = {name: json.loads(Path(path).read_text("utf-8")) for name, _, path in named}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    found = json.loads(args.json.read_text("utf-8"))
    draw({name: each["rates"] for name, each in found.items()}, args.plot)


if __name__ == "__main__":
    main()

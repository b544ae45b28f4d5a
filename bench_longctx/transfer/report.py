"""Results as lines and as the table that decides."""

from __future__ import annotations

import statistics
from typing import Any

Result = dict[str, Any]
# In the order in which they run; the last one is the likeliest to upset the driver.
SECTIONS = ("pool", "alone", "beside", "partition")


def line(result: Result) -> str:
    """One result as a line of the table."""
    head = f"{result['section']:9} {result['what']:46}"
    rest = {name: value for name, value in result.items() if name not in ("section", "what")}
    return f"{head} " + "  ".join(f"{name}={value}" for name, value in rest.items())


def table(results: list[Result]) -> str:
    """The figures that decide: each way beside steps, a column a batch size, cheapest first; may be empty."""
    rows: dict[str, dict[int, Result]] = {}
    for result in results:
        if "ms_per_gb" in result:
            what = result["what"] + (f" + {result['mover']}" if "mover" in result else "")
            rows.setdefault(what, {})[result["requests"]] = result
    if not rows:
        return ""
    batches = sorted({requests for cells in rows.values() for requests in cells})
    lines = ["", "ms of denoising lost per GB | slowdown % | GB/s meanwhile", ""]
    lines.append(f"{'':58}" + "".join(f"{'B=' + str(requests):>26}" for requests in batches))
    for what, cells in sorted(rows.items(), key=lambda item: cost(item[1])):
        text = "".join(
            f"{c['ms_per_gb']:>10} |{c['slowdown_percent']:>6} |{c['gb_per_s']:>6}"
            if (c := cells.get(b))
            else " " * 26
            for b in batches
        )
        own = next(
            (f"  (no gather: {c['own_percent']:+} %)" for c in cells.values() if "own_percent" in c), ""
        )
        lines.append(f"{what:58}{text}{own}")
    return "\n".join(lines)


def cost(cells: dict[int, Result]) -> float:
    """Mean milliseconds per GB over the batch sizes, to sort by."""
    return statistics.fmean(cell["ms_per_gb"] for cell in cells.values())

"""The table of figures against what they must reach."""

from __future__ import annotations

from typing import Any

Row = tuple[str, str, str]


def render(suites: dict[str, Any], goals: bool = True) -> str:
    """Markdown rows of what the decode, dense and prefill suites found; empty where they found nothing.

    Args:
        goals: say what must be reached: with models of full size on the device that the goals are for.
    """
    rows: list[Row] = []
    runs = suites.get("decode", {}).get("runs", [])
    dense = suites.get("dense", {}).get("runs", [])
    short = min((r["prefix"] for r in runs), default=0)
    for batch in sorted({r["batch"] for r in runs if r["prefix"] == short}):
        full, lanes, bare = (_find(runs, short, batch, 20, kind) for kind in ("full", "lanes", "bare"))
        if full and lanes and bare:
            over = full["block_seconds"] / lanes["block_seconds"]
            over_bare = full["block_seconds"] / bare["block_seconds"]
            text = f"{over:.3f} over the same lanes, {over_bare:.3f} over no look-ahead at all"
            rows.append((f"block with its retrieval / without, batch {batch}", "1.05", text))
    for run in runs:
        if run["retrieval"] != "full":
            continue
        where = f"{_k(run['prefix'])}, batch {run['batch']}, T={run['steps']}"
        rows.append((f"tokens/s, {where}", "", f"{run['tokens_per_second']:.0f}"))
        rows.append((f"exposed share, {where}", "3 % / 15 %", f"{100 * run['exposed_share']:.2f} %"))
        rows.append((f"CPU time of a launch, {where}", "150 us", f"{run['launch_cpu_us']:.0f} us"))
    for prefix in sorted({r["prefix"] for r in dense}):
        for steps in (20, 8):
            mine, other = _best(runs, prefix, steps), _best(dense, prefix, steps)
            if mine and other:
                ratio = mine["tokens_per_second"] / other["tokens_per_second"]
                text = f"{ratio:.2f} ({mine['tokens_per_second']:.0f} / {other['tokens_per_second']:.0f}, "
                text += f"batch {mine['batch']} / {other['batch']})"
                rows.append((f"tokens/s over dense, {_k(prefix)}, T={steps}", "2.2 / 2.0 at T=20", text))
        mine, other = _find(runs, prefix, 1, 20), _find(dense, prefix, 1, 20)
        if mine and other:
            ratio = other["block_seconds"] / mine["block_seconds"]
            text = (
                f"{ratio:.2f} ({1e3 * mine['block_seconds']:.1f} ms / {1e3 * other['block_seconds']:.1f} ms)"
            )
            rows.append((f"block latency over dense, {_k(prefix)}, batch 1", "1.15 / 1.7", text))
    for batch, busy in suites.get("decode", {}).get("busy", {}).items():
        text = f"{100 * busy['busy_share']:.1f} % ({busy['kernels_a_step']:.0f} kernels a step)"
        rows.append((f"GPU busy, batch {batch}", "95 %", text))
    for run in suites.get("prefill", {}).get("runs", []):
        where = f"{_k(run['tokens'])}, {'offloaded' if run['offload'] else 'KV on the device'}"
        text = f"{run['seconds']:.2f} s, {run['tflops']:.0f} TFLOP/s"
        if run["peak_bytes_above_weights"] is not None:
            text += f", {run['peak_bytes_above_weights'] / 1e9:.2f} GB above the weights"
        rows.append((f"prefill, {where}", "395 TFLOP/s", text))
    if not rows:
        return ""
    lines = ["| figure | must reach | found |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {bar if goals else ''} | {text} |" for name, bar, text in rows])


def _k(tokens: int) -> str:
    return f"{round(tokens / 1000)}K"


def _find(
    runs: list[dict[str, Any]], prefix: int, batch: int, steps: int, retrieval: str = "full"
) -> dict[str, Any] | None:
    wanted = (prefix, batch, steps, retrieval)
    return next((r for r in runs if (r["prefix"], r["batch"], r["steps"], r["retrieval"]) == wanted), None)


def _best(runs: list[dict[str, Any]], prefix: int, steps: int) -> dict[str, Any] | None:
    found = [r for r in runs if (r["prefix"], r["steps"], r["retrieval"]) == (prefix, steps, "full")]
    return max(found, key=lambda run: run["tokens_per_second"], default=None)

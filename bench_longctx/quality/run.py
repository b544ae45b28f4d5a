"""Scores a model on the retrieval tasks, with full KV and with sparse budgets, on the same documents.

    python -m bench_longctx.quality.run --lengths 8192 16384 --budgets full 0.10 0.05 --json out.json

Documents are drawn anew from haystack text that training never saw; every budget sees the same ones.
"full" is the engine without offload. Exact match: every item of the answer, in order.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench_longctx import machine, tasks
from bench_longctx.tasks.haystack import Haystack
from herald import LLM, EngineConfig, OffloadConfig, SamplingParams


def documents(names: list[str], length: int, count: int, seed: int) -> list[tasks.Example]:
    """``count`` examples of each task at ``length`` bytes, the same whatever other tasks are asked for."""
    haystack = Haystack.load()
    return [
        tasks.make(name, length, random.Random(f"{seed} {length} {name} {i}"), haystack)
        for name in names
        for i in range(count)
    ]


def wilson(right: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share (Wilson's score interval)."""
    if of == 0:
        return 0.0, 1.0
    share = right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def offload_for(budget: str, args: argparse.Namespace) -> OffloadConfig:
    if budget == "full":
        return OffloadConfig(enabled=False)
    return OffloadConfig(
        kv_budget=float(budget),
        index_bits=args.index_bits,
        score_operator=args.operator,
        lookahead_step=args.lookahead_step,
    )


def score_budget(
    budget: str, length: int, examples: list[tasks.Example], args: argparse.Namespace
) -> dict[str, Any]:
    """Run every example at one budget."""
    params = SamplingParams(max_tokens=args.max_tokens, confidence_threshold=args.threshold)
    began = time.perf_counter()
    engine = EngineConfig(max_num_seqs=args.batch)
    with LLM(
        args.model, device=args.device, dtype=args.dtype, offload=offload_for(budget, args), engine=engine
    ) as llm:
        outputs = llm.generate([example.prompt for example in examples], params)
    cells: dict[str, Any] = {}
    for task in args.tasks:
        scored = [
            tasks.score(e, o.outputs[0].text)
            for e, o in zip(examples, outputs, strict=True)
            if e.task == task
        ]
        right = sum(bool(exact) for exact, _ in scored)
        low, high = wilson(right, len(scored))
        items = sum(share for _, share in scored) / len(scored)
        cells[task] = {"right": right, "of": len(scored), "low": low, "high": high, "items": items}
    metrics = [o.metrics for o in outputs]
    return {
        "budget": budget,
        "length": length,
        "tasks": cells,
        "seconds": time.perf_counter() - began,
        "steps_per_block": sum(m.steps for m in metrics) / max(sum(m.blocks for m in metrics), 1),
        "rows_moved": sum(m.rows_moved for m in metrics),
        "exposed_seconds": sum(m.exposed_seconds for m in metrics),
        "decode_seconds": sum(m.decode_seconds for m in metrics),
        "answers": [o.outputs[0].text for o in outputs],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row for each length and budget, a column for each task (right of asked)."""
    head = ["length", "KV", *results[0]["tasks"]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [f"{c['right']}/{c['of']}" for c in result["tasks"].values()]
        budget = "full" if result["budget"] == "full" else f"{float(result['budget']):.0%}"
        lines.append(f"| {result['length'] // 1024}K | {budget} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_report(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write what there is so far: a run that is cut short keeps its finished cells."""
    if args.json is None:
        return
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"machine": machine.describe(), "options": options, "results": results}
    args.json.write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384], help="bytes of a prompt")
    parser.add_argument("--budgets", nargs="+", default=["full", "0.10", "0.05"])
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=list(tasks.TASKS))
    parser.add_argument("--count", type=int, default=50, help="documents of each task")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode together")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--index-bits", type=int, default=8)
    parser.add_argument("--operator", default="max")
    parser.add_argument("--lookahead-step", type=int, default=OffloadConfig().lookahead_step)
    parser.add_argument("--json", type=Path, help="write results, versions and machine there")
    args = parser.parse_args()

    results = []
    for length in args.lengths:
        examples = documents(args.tasks, length, args.count, args.seed)
        for budget in args.budgets:
            results.append(score_budget(budget, length, examples, args))
            write_report(results, args)
            print(f"{length} {budget} {results[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()

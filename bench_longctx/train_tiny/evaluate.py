"""Exact-match scores by real decoding on held-out text.

python bench_longctx/train_tiny/evaluate.py MODEL_FOLDER --lengths 2048 8192 --count 12
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench_longctx import tasks
from bench_longctx.tasks import structured
from bench_longctx.tasks.haystack import Haystack
from bench_longctx.train_tiny import tokenizer
from bench_longctx.train_tiny.decode import generate
from bench_longctx.train_tiny.model import TinySDAR

TASKS = (*tasks.TASKS, *structured.TASKS)


def evaluate(
    model: TinySDAR, haystack: Haystack, length: int, count: int, row_tokens: int, seed: int = 1234
) -> dict:
    """Score `count` examples of every task at `length` bytes, all in one batch.

    Returns {task: {"exact", "items", "count", "failures": up to two (answer, output) pairs}} with "seconds",
    "forwards" and the mean "exact" of all tasks beside them.
    """
    began = time.perf_counter()
    rng = random.Random(seed + length)
    examples = [
        module.make(task, length, rng, haystack)
        for module in (tasks, structured)
        for task in module.TASKS
        for _ in range(count)
    ]
    outputs, forwards = generate(
        model, [tokenizer.encode(e.prompt) for e in examples], structured.ANSWER_BYTES, row_tokens=row_tokens
    )
    result: dict = {}
    for task in TASKS:
        scored = [(e, tokenizer.decode(o)) for e, o in zip(examples, outputs, strict=True) if e.task == task]
        points = [(structured if task in structured.TASKS else tasks).score(e, o) for e, o in scored]
        failures = [
            (e.answer, o.strip()) for (e, o), (exact, _) in zip(scored, points, strict=True) if not exact
        ]
        result[task] = {
            "exact": sum(p[0] for p in points) / count,
            "items": round(sum(p[1] for p in points) / count, 3),
            "count": count,
            "failures": failures[:2],
        }
    mean = sum(result[t]["exact"] for t in TASKS) / len(TASKS)
    return result | {
        "exact": round(mean, 3),
        "forwards": forwards,
        "seconds": round(time.perf_counter() - began, 2),
    }


def line(result: dict) -> str:
    """One line of figures."""
    return " ".join(f"{t} {result[t]['exact']:.2f}/{result[t]['items']:.2f}" for t in TASKS)


def main() -> None:
    """Evaluate an exported folder and print JSON."""
    from bench_longctx.train_tiny import export

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--count", type=int, default=12, help="examples of each task")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = export.read(args.model).to(device)
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    results = {}
    for length in args.lengths:
        row = 65536 if device.type == "cuda" else -(-length // 128) * 128
        results[length] = evaluate(model, Haystack.load(), length, args.count, row)
        print(length, line(results[length]), f"{results[length]['seconds']} s", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

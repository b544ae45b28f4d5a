"""How long a running answer stands still while a long prompt is prefilled beside it.

    python -m bench_longctx.serving.bench_stall --prompt 32000 --json stall.json
    python -m bench_longctx.serving.bench_stall --tokens-per-step 160 --json stall.json --label 160
    python -m bench_longctx.serving.bench_stall --preset sdar-8b --device cuda --json stall.json

One request decodes; its steps are timed alone, and from the arrival of a long prompt to the end of that
prompt's prefill. A step counts when its report was read. Results are added to the file under their label.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_longctx import machine, output
from bench_longctx.stepping import step
from bench_longctx.throughput.synthetic import NoTokenizer, random_model
from herald import EngineConfig, OffloadConfig, SamplingParams
from herald.engine.engine import Engine
from herald.engine.request import Phase, Request
from herald.models import load_model, resolve_model
from herald.tokenizer import Tokenizer

# Steps timed before the prompt arrives.
ALONE = 60


@output.command
def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    output.check_file(args.json)
    engine = _engine(args)
    try:
        result = measure(engine, args.prompt, args.steps)
    finally:
        engine.close()
    result["machine"] = machine.describe()
    result["model"] = args.preset or args.model
    result["torch_threads"] = torch.get_num_threads()
    print(json.dumps(result, indent=1))
    if args.json:
        kept = json.loads(args.json.read_text("utf-8")) if args.json.exists() else {}
        output.write_report(args.json, {**kept, args.label: result})
    return 0


def measure(engine: Engine, prompt: int, steps: int) -> dict[str, Any]:
    """Seconds between two steps of a running request, alone and beside the prefill of ``prompt`` tokens."""
    params = SamplingParams(
        max_tokens=512, ignore_eos=True, confidence_threshold=None, denoising_steps=steps, seed=0
    )
    running = engine.add_request(_tokens(engine, 256), dataclasses.replace(params, max_tokens=16_384))
    while running.counters.steps < 2 * steps:
        step(engine, [running])
    alone = _gaps(engine, running, lambda: running.counters.steps >= 2 * steps + ALONE)
    late = engine.add_request(_tokens(engine, prompt), params)
    start = time.perf_counter()
    beside = _gaps(engine, running, lambda: late.phase is Phase.DECODE)
    took = time.perf_counter() - start
    if late.error is not None or running.phase is Phase.FINISHED:
        raise SystemExit(f"the measurement is not valid: {late.error or 'the running request ended'}")
    return {
        "prompt_tokens": prompt,
        "prefill_seconds": took,
        "alone": _summary(alone),
        "beside_prefill": _summary(beside),
        "engine": dataclasses.asdict(engine.config),
    }


def _gaps(engine: Engine, request: Request, done: Any) -> list[float]:
    gaps, seen, since = [], request.counters.steps, time.perf_counter()
    while not done() and request.phase is not Phase.FINISHED:
        step(engine, [request])
        if request.counters.steps != seen:
            now = time.perf_counter()
            gaps.append(now - since)
            seen, since = request.counters.steps, now
    return [*gaps, time.perf_counter() - since]


def _summary(gaps: list[float]) -> dict[str, float]:
    many = np.array(gaps)
    return {
        "steps": len(gaps),
        "median_seconds": float(np.median(many)),
        "p99_seconds": float(np.quantile(many, 0.99)),
        "longest_seconds": float(many.max()),
    }


def _tokens(engine: Engine, count: int) -> list[int]:
    vocabulary = min(engine.model.config.vocab_size, 256)
    return np.random.default_rng(count).integers(0, vocabulary, count).tolist()


def _engine(args: argparse.Namespace) -> Engine:
    options = {"tokens_per_step": args.tokens_per_step} if args.tokens_per_step else {}
    config = EngineConfig(max_num_seqs=args.max_num_seqs, prefill_chunk=args.prefill_chunk, **options)
    offload = OffloadConfig(kv_budget=args.kv_budget)
    device = torch.device(args.device)
    if args.preset:
        tokenizer: Any = NoTokenizer()
        model = random_model(args.preset, args.block_length, args.prompt + 32_768, device)
    else:
        path = resolve_model(args.model)
        tokenizer = Tokenizer(path)
        model = load_model(path, device, torch.float32 if args.device == "cpu" else torch.bfloat16)
    engine = Engine(model, tokenizer, offload, config, seed=0)
    engine.memory.ensure(*_room(engine, args.prompt))
    return engine


def _room(engine: Engine, prompt: int) -> tuple[int, int]:
    """Arena rows and pages of both requests, so that neither waits for memory."""
    positions = prompt + 512 + 17_000
    return positions, engine.memory.pages_for(positions)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--preset", help="random weights of a preset's shape instead of a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=int, default=32_000, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a block (default: %(default)s)")
    parser.add_argument("--block-length", type=int, default=32, help="of a preset (default: %(default)s)")
    parser.add_argument("--kv-budget", type=float, default=0.08)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--tokens-per-step", type=int, default=0, help="0 for the engine's default")
    parser.add_argument("--prefill-chunk", type=int, default=EngineConfig.prefill_chunk)
    parser.add_argument("--label", default="after", help="under which the result is kept")
    parser.add_argument("--json", type=Path, help="file that results are added to")
    return parser


if __name__ == "__main__":
    sys.exit(main())

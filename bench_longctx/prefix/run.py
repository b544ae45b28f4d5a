"""How much sooner a second question about a document is answered, and whether it gets the same tokens.

    python -m bench_longctx.prefix.run --tokens 16384 --json bench_longctx/results/prefix_tiny.json

The document and the questions are random tokens. Every question is asked once more on a model that shares
nothing; its tokens must be the same, else the exit code is 1 and no ratio is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench_longctx import machine, output
from herald import LLM, EngineConfig, OffloadConfig, RequestOutput, SamplingParams


def open_llm(args: argparse.Namespace, sharing: bool) -> LLM:
    offload = OffloadConfig(kv_budget=args.kv_budget, prefix_sharing=sharing)
    engine = EngineConfig(max_num_seqs=1, prefill_chunk=args.prefill_chunk)
    return LLM(args.model, device=args.device, dtype=args.dtype, offload=offload, engine=engine)


def ask(args: argparse.Namespace, llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """Answer the prompts one after the other."""
    params = SamplingParams(
        max_tokens=args.new_tokens, denoising_steps=args.steps, confidence_threshold=None, ignore_eos=True
    )
    # Kernels compile and libraries load here.
    llm.generate(prompt_token_ids=[prompts[0][:1024][::-1]], sampling_params=params)
    return [llm.generate(prompt_token_ids=[each], sampling_params=params)[0] for each in prompts]


def load_and_ask(args: argparse.Namespace, folder: Path, prompt: list[int]) -> tuple[float, RequestOutput]:
    """Seconds that loading a saved document takes, and the answer to a question about it."""
    with open_llm(args, True) as llm:
        begin = time.perf_counter()
        llm.load_prefix(folder)
        seconds = time.perf_counter() - begin
        return seconds, ask(args, llm, [prompt])[0]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)

    def ids(count: int) -> list[int]:
        return rng.integers(0, args.vocab, count).tolist()

    document = ids(args.tokens)
    prompts = [document + ids(args.question_tokens + n) for n in range(args.questions)]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "document"
        with open_llm(args, True) as llm:
            shared = ask(args, llm, prompts)
            begin = time.perf_counter()
            num_bytes = llm.save_prefix(document, folder)
            save_seconds = time.perf_counter() - begin
        load_seconds, loaded = load_and_ask(args, folder, prompts[-1])
    with open_llm(args, False) as llm:
        bare = ask(args, llm, prompts)
    seconds = [each.metrics.first_block_seconds for each in shared]
    same = [a.token_ids == b.token_ids for a, b in zip([*shared, loaded], [*bare, bare[-1]], strict=True)]
    later = statistics.median(seconds[1:])
    return {
        "same_tokens": same,
        "cached_tokens": [each.metrics.cached_tokens for each in shared],
        "first_block_seconds": seconds,
        "first_block_seconds_without_sharing": [each.metrics.first_block_seconds for each in bare],
        "times_sooner": seconds[0] / later if all(same) else None,
        "disk": {
            "bytes": num_bytes,
            "save_seconds": save_seconds,
            "load_seconds": load_seconds,
            "first_block_seconds_after_loading": loaded.metrics.first_block_seconds,
            "cached_tokens": loaded.metrics.cached_tokens,
        },
    }


@output.command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=16384, help="of the document")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--question-tokens", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="denoising steps a block")
    parser.add_argument("--kv-budget", type=float, default=OffloadConfig.kv_budget)
    parser.add_argument("--prefill-chunk", type=int, default=EngineConfig.prefill_chunk)
    parser.add_argument("--vocab", type=int, default=250, help="random tokens are below this")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    output.check_file(args.json)
    result = measure(args)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"machine": machine.describe(), "options": options, "result": result}
    print(json.dumps(result, indent=1))
    output.write_report(args.json, report)
    return 0 if all(result["same_tokens"]) else 1


if __name__ == "__main__":
    sys.exit(main())

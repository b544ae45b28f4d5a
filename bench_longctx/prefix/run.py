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

from bench_longctx import machine
from herald import LLM, EngineConfig, OffloadConfig, RequestOutput, SamplingParams


def ask(args: argparse.Namespace, prompts: list[list[int]], sharing: bool) -> tuple[list[RequestOutput], Any]:
    """Answer the prompts one after the other, in a model of their own; what saving took, if it shares."""
    offload = OffloadConfig(kv_budget=args.kv_budget, prefix_sharing=sharing)
    params = SamplingParams(
        max_tokens=args.new_tokens, denoising_steps=args.steps, confidence_threshold=None, ignore_eos=True
    )
    engine = EngineConfig(max_num_seqs=1, prefill_chunk=args.prefill_chunk)
    with LLM(args.model, device=args.device, dtype=args.dtype, offload=offload, engine=engine) as llm:
        # Kernels compile and libraries load here.
        llm.generate(prompt_token_ids=[prompts[0][:1024][::-1]], sampling_params=params)
        outputs = [llm.generate(prompt_token_ids=[each], sampling_params=params)[0] for each in prompts]
        return outputs, save_and_load(llm, prompts[0][: args.tokens]) if sharing else None


def save_and_load(llm: LLM, document: list[int]) -> dict[str, Any]:
    """Seconds and bytes of the document's pages on disk."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        llm.save_prefix(document, Path(folder) / "document")
        saved = time.perf_counter()
        llm.load_prefix(Path(folder) / "document").release()
        loaded = time.perf_counter()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {"save_seconds": saved - begin, "load_seconds": loaded - saved, "bytes": size}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)

    def ids(count: int) -> list[int]:
        return rng.integers(0, args.vocab, count).tolist()

    document = ids(args.tokens)
    prompts = [document + ids(args.question_tokens + n) for n in range(args.questions)]
    shared, disk = ask(args, prompts, True)
    bare, _ = ask(args, prompts, False)
    seconds = [output.metrics.first_block_seconds for output in shared]
    same = [a.token_ids == b.token_ids for a, b in zip(shared, bare, strict=True)]
    later = statistics.median(seconds[1:])
    return {
        "same_tokens": same,
        "cached_tokens": [output.metrics.cached_tokens for output in shared],
        "first_block_seconds": seconds,
        "first_block_seconds_without_sharing": [output.metrics.first_block_seconds for output in bare],
        "times_sooner": seconds[0] / later if all(same) else None,
        "disk": disk,
    }


def main() -> int:
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
    args = parser.parse_args()
    result = measure(args)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"machine": machine.describe(), "options": options, "result": result}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if all(result["same_tokens"]) else 1


if __name__ == "__main__":
    sys.exit(main())

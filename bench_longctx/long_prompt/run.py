"""Sends one long prompt of random tokens through a model and reports memory, times and overlap.

    python -m bench_longctx.make_checkpoint /data/sdar-8b --preset sdar-8b --device cuda
    python -m bench_longctx.long_prompt.run /data/sdar-8b --tokens 32768 --json out.json

Random weights decode nonsense, but every byte, step and transfer is that of a trained model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_longctx import machine, output
from herald import LLM, EngineConfig, OffloadConfig, SamplingParams
from herald.profile.summary import overlap


def prompt_ids(tokens: int, vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, tokens).tolist()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    offload = OffloadConfig(
        enabled=args.offload,
        kv_budget=args.kv_budget,
        index_bits=args.index_bits,
        lookahead_step=args.lookahead_step,
        prefix_sharing=False,  # the warm-up has the same prompt
    )
    params = SamplingParams(
        max_tokens=args.new_tokens,
        denoising_steps=args.steps,
        confidence_threshold=None,
        block_length=args.block_length,
        ignore_eos=True,
        seed=0,
    )
    began = time.perf_counter()
    engine = EngineConfig(max_num_seqs=1, prefill_chunk=args.prefill_chunk)
    with LLM(args.model, device=args.device, dtype=args.dtype, offload=offload, engine=engine) as llm:
        load_seconds = time.perf_counter() - began
        ids = prompt_ids(args.tokens, llm.model.config.mask_token_id, args.seed)
        if args.warm_up:
            llm.generate(prompt_token_ids=ids, sampling_params=params)  # records the graphs of its shapes
            llm.engine.trace.clear()
        cuda = llm.model.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        (output,) = llm.generate(prompt_token_ids=ids, sampling_params=params)
        metrics = output.metrics
        store = llm.engine.memory.store
        layout = llm.engine.memory.layout
        block = args.block_length or llm.model.config.block_length
        kept = (args.tokens + args.new_tokens - 1) // block * block  # the last block's KV is never needed
        return {
            "model": llm.model.config.family,
            "weight_bytes": llm.model.weight_bytes,
            "load_seconds": load_seconds,
            "peak_device_bytes_above_weights": (
                torch.cuda.max_memory_allocated() - llm.model.weight_bytes if cuda else None
            ),
            "kv_bytes_per_token": layout.token_bytes,
            "host_kv_bytes": metrics.host_kv_bytes,
            "host_kv_bytes_computed": layout.pages_for(kept) * layout.page_bytes,
            "pinned": store.pool.slab.pinned if store is not None else None,
            "transfer": store.transfer.name if store is not None else None,
            "transfer_why": store.transfer_why if store is not None else None,
            "metrics": {k: v for k, v in vars(metrics).items()},
            "tokens_per_second": metrics.tokens_per_second,
            "seconds_per_step": metrics.decode_seconds / max(metrics.forwards, 1),
            "overlap": asdict(overlap(llm.engine.trace.spans())),
            "spans": [vars(s) for s in llm.engine.trace.spans() if s.kind != "prefill"][: args.spans],
        }


@output.command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="denoising steps a block")
    parser.add_argument("--block-length", type=int, default=0)
    parser.add_argument("--kv-budget", type=float, default=0.05)
    parser.add_argument("--index-bits", type=int, default=8)
    parser.add_argument("--lookahead-step", type=int, default=OffloadConfig().lookahead_step)
    parser.add_argument("--prefill-chunk", type=int, default=4096)
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spans", type=int, default=400, help="trace spans to keep in the JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    output.check_file(args.json)
    result = measure(args)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"machine": machine.describe(), "options": options, "result": result}
    shown = {k: v for k, v in result.items() if k != "spans"}
    print(json.dumps(shown, indent=1))
    output.write_report(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

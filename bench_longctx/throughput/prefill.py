"""Prefill of one long prompt: rate, memory, and whether the copies to the host are hidden."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from bench_longctx.stepping import step
from bench_longctx.throughput.synthetic import NoTokenizer
from herald.config import EngineConfig, OffloadConfig
from herald.engine.engine import Engine
from herald.engine.request import Phase
from herald.models import BlockModel
from herald.models.loader import num_active_parameters
from herald.sampling_params import SamplingParams


def flops(model: BlockModel, tokens: int) -> float:
    """Multiply-adds x 2 of the layers over a prompt, block-causal attention counted as half the square."""
    config = model.config
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    linear = 2.0 * (num_active_parameters(config) - embeddings) * tokens
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * tokens * tokens / 2
    return linear + attention


def measure(model: BlockModel, tokens: int, offload: OffloadConfig, chunk: int, runs: int) -> dict[str, Any]:
    """Prefill a random prompt ``runs`` times (after a short one); the best and all times."""
    config = EngineConfig(max_num_seqs=1, max_model_len=model.config.max_positions, prefill_chunk=chunk)
    engine = Engine(model, NoTokenizer(), offload, config, seed=0)  # type: ignore[arg-type]
    cuda = model.device.type == "cuda"
    params = SamplingParams(
        max_tokens=1, denoising_steps=1, confidence_threshold=None, ignore_eos=True, seed=0
    )
    rng = np.random.default_rng(0)
    seconds = []
    peak = 0
    for run in range(runs + 1):
        length = tokens if run else min(tokens, 2 * chunk)
        if run == 1:
            engine.close()
            engine = Engine(model, NoTokenizer(), offload, config, seed=0)  # type: ignore[arg-type]
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        request = engine.add_request(rng.integers(0, model.config.mask_token_id, length).tolist(), params)
        while request.phase is not Phase.FINISHED:
            step(engine, [request])
        if run:
            seconds.append(request.prefilled - request.prefill_started)
            peak = torch.cuda.max_memory_allocated() if cuda else 0
        if engine.retriever is not None:
            engine.retriever.drain()
    began = time.perf_counter()
    engine.close()
    best = sorted(seconds)[len(seconds) // 2]
    return {
        "tokens": tokens,
        "offload": offload.enabled,
        "seconds": best,
        "seconds_all": seconds,
        "tokens_per_second": tokens / best,
        "tflops": flops(model, tokens) / best / 1e12,
        "peak_bytes_above_weights": peak - model.weight_bytes if cuda else None,
        "close_seconds": time.perf_counter() - began,
    }

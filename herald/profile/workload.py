"""The run that is profiled: prompts, a warm-up, and what was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from herald.engine.engine import ProgressCallback
from herald.engine.trace import Span
from herald.errors import HostPoolTooSmall
from herald.llm import LLM
from herald.outputs import RequestMetrics
from herald.profile.kernels import KernelTimes, record_kernels
from herald.sampling_params import SamplingParams

# Long runs keep every span: a request of 128K tokens has some thousands from its prefill alone.
TRACE_CAPACITY = 2_000_000
# Enough that rows have to be chosen (a short prompt stays resident whole), over a few blocks.
WARM_UP_TOKENS, WARM_UP_BLOCKS = 1024, 3


@dataclass(frozen=True)
class Run:
    """What a workload left.

    Attributes:
        facts: family, device and shapes, for the reader of the figures.
        row_bytes: bytes of one row of the KV cache.
        kernels: what the device recorded over some blocks of the first prompt, and how many steps they took;
            None on a CPU.
    """

    spans: list[Span]
    metrics: list[RequestMetrics]
    facts: dict[str, Any]
    row_bytes: int
    kernels: tuple[KernelTimes, int] | None

    @property
    def resident_bytes(self) -> int:
        """Device bytes of all resident sets and their staging."""
        return sum(each.resident_bytes for each in self.metrics)


def random_prompts(
    count: int, tokens: int, vocab_size: int, mask_token_id: int, others: Sequence[int] = ()
) -> list[list[int]]:
    """``count`` prompts of ``tokens`` random ids, no two alike; the same in every run.

    None is the mask, nor one of ``others``, which cannot be prompted.
    """
    left_out = sorted({mask_token_id, *others})
    prompts = []
    for seed in range(count):
        ids = np.random.default_rng(seed).integers(0, vocab_size - len(left_out), tokens)
        for token in left_out:
            ids += ids >= token
        prompts.append(ids.tolist())
    return prompts


def run_workload(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    progress: ProgressCallback | None = None,
) -> Run:
    """Decode prompts in one batch, after a short run of the first that compiles and loads what is needed.

    Args:
        prompts: token ids.

    Raises:
        HeraldError: as `LLM.generate`.
    """
    block = params.block_length or llm.model.config.block_length or params.max_tokens
    short = replace(params, max_tokens=min(params.max_tokens, WARM_UP_BLOCKS * block))
    # A pool too small for it is too small for the run, which then says what that needs.
    with contextlib.suppress(HostPoolTooSmall):
        # Backwards, so that the run finds none of its pages.
        llm.generate(prompt_token_ids=[prompts[0][:WARM_UP_TOKENS][::-1]], sampling_params=short)
    _settle(llm)
    trace = llm.engine.trace
    trace.clear()
    trace.capacity = TRACE_CAPACITY
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, progress=progress)
    _settle(llm)
    layout, store = llm.engine.memory.layout, llm.engine.memory.store
    facts = {
        "family": llm.model.config.family,
        "device": str(llm.model.device),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "block_length": block,
        "kv_bytes_per_token": layout.token_bytes,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "kv_budget": llm.offload.kv_budget if llm.offload.enabled else None,
        "index_bits": llm.offload.index_bits if store is not None else None,
        "transfer": store.transfer.name if store is not None else None,
        "selection_threads": store.num_threads if store is not None else None,
    }
    spans = trace.spans()
    kernels = _record_kernels(llm, prompts[0], short) if llm.model.device.type == "cuda" else None
    return Run(spans, [output.metrics for output in outputs], facts, layout.row_bytes, kernels)


def _record_kernels(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> tuple[KernelTimes, int]:
    """Kernels and steps of a few blocks of a prompt, its prefill left out."""
    blocks = llm.stream(prompt_token_ids=[prompt], sampling_params=params)
    steps = [next(blocks).metrics.steps]
    times = record_kernels(lambda: steps.extend(output.metrics.steps for output in blocks))
    return times, steps[-1] - steps[0]


def _settle(llm: LLM) -> None:
    """Wait for copies and indexing that a finished request left behind, and for their spans."""
    if llm.engine.retriever is not None:
        llm.engine.retriever.drain()

"""Matrix products of a step by each library, and a whole step with each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import functional as F

from bench_longctx.kernels.step import SET_ROWS, TINY_SET_ROWS, Step, Variant, random_model, shape
from bench_longctx.kernels.timing import Call, Figure, Limits, figure, seconds_each

LANES, TINY_LANES = (1, 2, 4, 8, 20), (1, 2)
STEP_LANES = (1, 8, 20, 40)
LIBRARIES = ("cublas", "cublaslt")


@contextmanager
def library(name: str) -> Iterator[None]:
    """Let torch's products on CUDA use one library; what is recorded in a graph meanwhile keeps it."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def calls_by_kind(model: Variant, tokens: int) -> dict[str, list[tuple[Call, int]]]:
    """Products of every layer as a step runs them, and the values of their weights."""
    config = model.config
    new = partial(torch.randn, tokens, device=model.device, dtype=model.dtype)
    hidden, gated = new(config.hidden_size), new(config.intermediate_size)
    attention = new(config.num_heads * config.head_dim)
    kinds: dict[str, list[tuple[Call, int]]] = {"qkv": [], "output": [], "gate_up": [], "down": []}
    for layer in model.layers:
        kinds["qkv"].append((partial(F.linear, hidden, layer.qkv), layer.qkv.numel()))
        kinds["output"].append((partial(hidden.addmm_, attention, layer.output.T), layer.output.numel()))
        kinds["gate_up"].append((partial(F.linear, hidden, layer.gate_up), layer.gate_up.numel()))
        kinds["down"].append((partial(hidden.addmm_, gated, layer.down.T), layer.down.numel()))
    # The head is larger than the L2 cache: one is enough.
    kinds["head"] = [(partial(F.linear, hidden, model.head), model.head.numel())]
    kinds["all"] = [call for group in zip(*list(kinds.values())[:4], strict=True) for call in group]
    kinds["all"] += kinds["head"]
    return kinds


def product_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Times of one product of each kind and of all those of a step, by each library."""
    yield from product_choices(random_model(shape(tiny), device), tiny, limits)


def product_choices(model: Variant, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """The same for a given model."""
    for lanes in TINY_LANES if tiny else LANES:
        tokens = lanes * model.config.block_length
        for kind, calls in calls_by_kind(model, tokens).items():
            values = sum(number for _, number in calls)
            # A kind is the mean of its layers, "all" their sum.
            times = len(calls) if kind != "all" else 1
            for name in LIBRARIES:
                with library(name):
                    seconds = seconds_each([call for call, _ in calls], 8) * len(calls) / times
                label = kind if name == "cublas" else f"{kind} lt"
                num_bytes = values / times * model.head.element_size()
                flop = 2 * values / times * tokens
                yield figure("products", label, f"{lanes} lanes", seconds, num_bytes, flop, limits)


def choice_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Products by kind, then whole steps, by each library."""
    model = random_model(shape(tiny), device)
    yield from product_choices(model, tiny, limits)
    set_rows = TINY_SET_ROWS if tiny else SET_ROWS
    config = model.config
    for lanes in TINY_LANES if tiny else STEP_LANES:
        arena_shape = (config.num_layers, config.num_kv_heads, lanes * set_rows, 2 * config.head_dim)
        step = Step(model, lanes, set_rows, torch.randn(arena_shape, device=device, dtype=config.dtype))
        label, costs = f"{lanes} lanes x {set_rows} rows", (step.attention_cost, step.product_cost)
        num_bytes, flop = (sum(parts) for parts in zip(*costs, strict=True))
        for name in LIBRARIES:
            with library(name):
                seconds = seconds_each([step.run], 8)
            kind = "step" if name == "cublas" else "step lt"
            yield figure("step", kind, label, seconds, num_bytes, flop, limits)

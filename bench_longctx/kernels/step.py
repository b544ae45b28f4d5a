"""A whole denoising step of an 8B model on random weights: its parts, and what each fusion is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional as F

from bench_longctx.kernels.timing import Call, Figure, Limits, figure, seconds_each
from herald.models.config import ModelConfig
from herald.models.presets import PRESETS
from herald.models.sdar import SdarModel
from herald_kernels import greedy_confidence, qk_norm_rope, resident_attention, silu_mul
from herald_kernels.ops.qk_norm_rope import reference as rope_reference

LANES, TINY_LANES = (1, 2, 8, 20, 40), (1, 3)
FUSIONS = ("norm", "residual", "gate", "rope")
SET_ROWS, TINY_SET_ROWS = 1638, 50


def shape(tiny: bool) -> ModelConfig:
    """SDAR-8B in blocks of 32, or something a CPU runs in a second."""
    config = replace(PRESETS["sdar-8b"], block_length=32)
    if not tiny:
        return config
    small = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
    return replace(
        config, **small, head_dim=32, vocab_size=300, mask_token_id=299, block_length=8, dtype=torch.float32
    )


class Variant(SdarModel):
    """A model with some of the fusions, the rest in plain torch."""

    fusions: frozenset[str] = frozenset(FUSIONS)

    def finish_layer(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        if {"residual", "gate"} <= self.fusions:
            return super().finish_layer(layer, hidden, attention)
        weights = self.layers[layer]
        hidden = self._add(hidden, attention, weights.output)
        gate_up = F.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up)
        if "gate" in self.fusions:
            return self._add(hidden, silu_mul(gate_up), weights.down)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._add(hidden, F.silu(gate) * up, weights.down)

    def _add(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if "residual" in self.fusions:
            return hidden.addmm_(x, weight.T)
        return hidden + F.linear(x, weight)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if "norm" in self.fusions:
            return super()._norm(hidden, weight)
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)


def random_model(config: ModelConfig, device: str) -> Variant:
    """A model whose weights keep its activations finite."""
    tensors = {}
    for parameter in SdarModel.parameters(config):
        tensor = torch.empty(parameter.shape, device=device, dtype=config.dtype)
        tensors[parameter.name] = tensor.normal_(0, 0.02) if tensor.ndim == 2 else tensor.fill_(1)
    return Variant(config, tensors)


@dataclass
class Step:
    """One step of N lanes of N requests, each over a set of its own.

    Args:
        arena: [layers, kv_heads, N * set rows, 2 * head_dim].
    """

    model: Variant
    lanes: int
    set_rows: int
    arena: torch.Tensor

    def __post_init__(self) -> None:
        config, device = self.model.config, self.model.device
        tokens = self.lanes * config.block_length
        self.tokens = torch.randint(0, config.vocab_size, (tokens,), device=device)
        self.positions = torch.arange(tokens, device=device) + 5000
        self.row_start = torch.arange(self.lanes, device=device) * self.set_rows
        lengths = (self.lanes, config.num_kv_heads)
        self.length = torch.full(lengths, self.set_rows, dtype=torch.int32, device=device)
        self.parent = torch.full((self.lanes,), -1, dtype=torch.int32, device=device)

    def run(self) -> torch.Tensor:
        """Embedding to confidence."""
        config, model = self.model.config, self.model
        cos, sin = model.rope(self.positions)
        hidden = model.embed(self.tokens)
        fused = "rope" in model.fusions
        rotate: Callable[..., None] = qk_norm_rope if fused else rope_reference.qk_norm_rope
        for layer in range(config.num_layers):
            qkv = model.qkv(layer, hidden)
            q, rows = self.outputs()
            weights = model.qk_norm_weights(layer)
            rotate(
                qkv, *weights, cos, sin, q, rows, config.num_heads, config.num_kv_heads, config.rms_norm_eps
            )
            out = self.attend(layer, q, rows)
            hidden = model.finish_layer(layer, hidden, out.view(hidden.shape[0], -1))
        return greedy_confidence(model.logits(hidden))[1]

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Unwritten queries and rows of a layer."""
        config, model = self.model.config, self.model
        tokens, block = self.tokens.numel(), config.block_length
        q = torch.empty(tokens, config.num_heads, config.head_dim, dtype=model.dtype, device=model.device)
        rows = (self.lanes, config.num_kv_heads, block, 2 * config.head_dim)
        return q, torch.empty(rows, dtype=model.dtype, device=model.device)

    def attend(self, layer: int, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The attention of a layer."""
        block = self.model.config.block_length
        by_lane = q.view(self.lanes, block, *q.shape[1:])
        out, _ = resident_attention(
            by_lane,
            rows,
            self.arena[layer],
            self.row_start,
            self.length,
            self.parent,
            self.model.softmax_scale,
            self.set_rows,
        )
        return out

    def attention_calls(self) -> list[Call]:
        """The attention of every layer, without the rest."""
        q, rows = self.outputs()
        q.normal_()
        rows.normal_()
        return [partial(self.attend, layer, q, rows) for layer in range(self.model.config.num_layers)]

    def products(self) -> None:
        """The matrix products of a step, without the rest."""
        model, config = self.model, self.model.config
        hidden = model.embed(self.tokens)
        attention = hidden.new_empty(hidden.shape[0], config.num_heads * config.head_dim)
        gated = hidden.new_empty(hidden.shape[0], config.intermediate_size)
        for weights in model.layers:
            F.linear(hidden, weights.qkv)
            hidden.addmm_(attention, weights.output.T)
            F.linear(hidden, weights.gate_up)
            hidden.addmm_(gated, weights.down.T)
        F.linear(hidden, model.head)

    @property
    def product_cost(self) -> tuple[float, float]:
        """Bytes and FLOP of the matrix products."""
        weights = [self.model.head]
        for layer in self.model.layers:
            weights += [layer.qkv, layer.output, layer.gate_up, layer.down]
        values = sum(weight.numel() for weight in weights)
        return values * self.model.head.element_size(), 2 * values * self.tokens.numel()

    @property
    def attention_cost(self) -> tuple[float, float]:
        """Bytes and FLOP of the attention."""
        config = self.model.config
        row_bytes = 2 * config.head_dim * self.arena.element_size()
        num_bytes = config.num_layers * config.num_kv_heads * self.lanes * self.set_rows * row_bytes
        per_token = 4 * config.num_layers * config.num_heads * config.head_dim
        return num_bytes, per_token * (self.set_rows + config.block_length) * self.tokens.numel()


def step_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Times of a step: its products alone, its attention alone, all of it, and all of it without a fusion."""
    config = shape(tiny)
    model = random_model(config, device)
    set_rows = TINY_SET_ROWS if tiny else SET_ROWS
    for lanes in TINY_LANES if tiny else LANES:
        arena_shape = (config.num_layers, config.num_kv_heads, lanes * set_rows, 2 * config.head_dim)
        arena = torch.empty(arena_shape, device=device, dtype=config.dtype).normal_()
        step = Step(model, lanes, set_rows, arena)
        label = f"{lanes} lanes x {set_rows} rows"

        products, attention = step.product_cost, step.attention_cost
        yield figure("step", "products alone", label, seconds_each([step.products]), *products, limits)
        calls = step.attention_calls()
        seconds = seconds_each(calls) * len(calls)
        yield figure("step", "attention alone", label, seconds, *attention, limits)
        for name, fusions in fusion_sets():
            model.fusions = fusions
            seconds = seconds_each([step.run])
            num_bytes, flop = products[0] + attention[0], products[1] + attention[1]
            yield figure("step", name, label, seconds, num_bytes, flop, limits)
        model.fusions = frozenset(FUSIONS)


def fusion_sets() -> Iterator[tuple[str, frozenset[str]]]:
    """All fusions, each left out, none."""
    every = frozenset(FUSIONS)
    yield "step", every
    for fusion in FUSIONS:
        yield f"step without {fusion}", every - {fusion}
    yield "step without any", frozenset()

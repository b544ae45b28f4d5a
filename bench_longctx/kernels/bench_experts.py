"""Speed of a layer's experts beside the limits of the hardware, measured inside CUDA graphs.

    python -m bench_longctx.kernels.bench_experts --json experts.json
    python -m bench_longctx.kernels.bench_experts --preset sdar-30b-a3b
    python -m bench_longctx.kernels.bench_experts --tune --json tune.json

Tokens choose experts at random, as evenly as chance is. The floor of `expert_mlp` is the larger of the
chosen experts' weights / copy rate and FLOP / product rate. ``--tune`` tries tiles, to be entered in
``herald_kernels/ops/tiles.py`` (some minutes). ``--tiny`` uses small shapes; without a CUDA device it runs
the Triton kernels in their interpreter, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_longctx import output
from bench_longctx.options import need_cuda

if TYPE_CHECKING:
    import torch

    from bench_longctx.kernels.timing import Figure, Limits
    from herald.models.config import ModelConfig
    from herald_kernels.ops.tiles import ProductTiles


TOKENS, TINY_TOKENS = (32, 64, 128, 256, 640, 1280, 2304, 4096), (2, 8)
TUNED_TOKENS = (32, 256, 640, 1280, 2304, 4096)


class Layer:
    """Random experts of one layer and hidden states for them."""

    def __init__(self, config: ModelConfig, tokens: int, device: str) -> None:
        import torch

        assert config.moe is not None
        self.config, self.moe = config, config.moe
        new = partial(torch.randn, device=device, dtype=config.dtype)
        experts, width, size = self.moe.num_experts, config.hidden_size, self.moe.intermediate_size
        self.hidden, self.out = new(tokens, width), new(tokens, width)
        self.router = new(experts, width) * width**-0.5
        self.bias = torch.zeros(experts, device=device) if self.moe.score == "sigmoid" else None
        self.gate_up = new(experts, 2 * size, width) * width**-0.5
        self.down = new(experts, width, size) * size**-0.5

    def set_tokens(self, tokens: int) -> None:
        """Other hidden states for the same experts."""
        import torch

        self.hidden = torch.randn(
            tokens, self.hidden.shape[1], device=self.hidden.device, dtype=self.hidden.dtype
        )
        self.out = torch.zeros_like(self.hidden)

    def route(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights."""
        from herald_kernels import route_experts

        moe = self.moe
        return route_experts(
            *(self.hidden, self.router, self.bias, moe.experts_per_token),
            score=moe.score,
            num_groups=moe.num_groups,
            top_groups=moe.top_groups,
            normalise=moe.normalise,
            scale=moe.scale,
        )

    def run(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        from herald_kernels import expert_mlp

        expert_mlp(self.hidden, ids, weights, self.gate_up, self.down, self.out)

    def cost(self, ids: torch.Tensor) -> tuple[float, float]:
        """Bytes of the weights that are needed, and FLOP."""
        expert = 3 * self.config.hidden_size * self.moe.intermediate_size
        touched = int(ids.unique().numel())
        return touched * expert * self.hidden.element_size(), 2.0 * expert * ids.numel()


def check(device: str) -> None:
    """The operations against their references on a small layer.

    Raises:
        AssertionError: they differ by more than their dtype explains.
    """
    import torch

    from bench_longctx.kernels.attention import assert_close
    from herald_kernels.ops.expert_mlp import reference

    layer = Layer(shape("llada2-mini", True), 50, device)
    ids, weights = layer.route()
    expected = layer.out.clone()
    reference.expert_mlp(layer.hidden, ids, weights, layer.gate_up, layer.down, expected)
    layer.run(ids, weights)
    assert_close(layer.out, expected, 1e-2 if layer.hidden.dtype == torch.bfloat16 else 1e-5, "expert_mlp")


def shape(preset: str, tiny: bool) -> ModelConfig:
    """A preset's shape, or a small one with as many kinds of parts."""
    import torch

    from herald.models.presets import PRESETS

    config = PRESETS[preset]
    assert config.moe is not None
    if not tiny:
        return config
    small = {"num_experts": 16, "experts_per_token": 4, "intermediate_size": 32}
    groups = {"num_groups": 4, "top_groups": 2} if config.moe.num_groups > 1 else {}
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return replace(config, hidden_size=64, dtype=dtype, moe=replace(config.moe, **small, **groups))


def figures(layer: Layer, all_tokens: tuple[int, ...], limits: Limits) -> Iterator[Figure]:
    """Router and experts for every number of tokens."""
    from bench_longctx.kernels.timing import figure, seconds_each

    for tokens in all_tokens:
        layer.set_tokens(tokens)
        ids, weights = layer.route()
        label = f"{tokens} tokens"
        seconds = seconds_each([layer.route] * 8)
        num_bytes = layer.hidden.nbytes + layer.router.nbytes
        yield figure(
            "experts",
            "route_experts",
            label,
            seconds,
            num_bytes,
            2 * ids.shape[0] * layer.router.numel(),
            limits,
        )
        seconds = seconds_each([partial(layer.run, ids, weights)] * 4)
        yield figure("experts", "expert_mlp", label, seconds, *layer.cost(ids), limits)


def variants(gated: bool) -> Iterator[ProductTiles]:
    """Tiles of the product of gate and up, or of down, that fit into a multiprocessor."""
    from herald_kernels.ops.tiles import SHARED_BYTES, ProductTiles, product_bytes

    shapes = itertools.product((16, 32, 64, 128), (32, 64, 128) if gated else (64, 128, 256))
    steps = ((64, 3), (64, 4), (128, 3))
    for (rows, columns), (depth, stages), described in itertools.product(shapes, steps, (False, True)):
        large = rows * columns * (2 if gated else 1) >= 128 * 128
        tile = ProductTiles(rows, columns, depth, 8 if large else 4, stages, described)
        if product_bytes(tile, 2 if gated else 1) <= SHARED_BYTES:
            yield tile


def product_seconds(layer: Layer, ids: torch.Tensor, gated: bool, tile: ProductTiles) -> float:
    """Seconds of one of the two products alone."""
    from bench_longctx.kernels.timing import seconds_each
    from herald_kernels.ops.expert_mlp import triton_kernel
    from herald_kernels.ops.expert_mlp.buckets import make_buckets

    buckets = make_buckets(ids, layer.moe.num_experts, tile.rows)
    inner = layer.hidden.new_zeros(buckets.pairs.numel(), layer.moe.intermediate_size)
    results = layer.hidden.new_zeros(ids.numel(), layer.hidden.shape[1])
    x, weight, out = (layer.hidden, layer.gate_up, inner) if gated else (inner, layer.down, results)
    product = partial(triton_kernel._grouped, x, weight, out, buckets, ids.numel(), ids.shape[1], gated)
    return seconds_each([partial(product, False, tile)] * 4, repeats=8)


def tune(layer: Layer, all_tokens: tuple[int, ...], limit: int) -> list[dict[str, Any]]:
    """Every variant's time, and for each number of tokens the best pair with as many rows."""
    found = []
    for tokens in all_tokens:
        layer.set_tokens(tokens)
        ids, _ = layer.route()
        best: dict[tuple[bool, int], tuple[float, ProductTiles]] = {}
        for gated in (True, False):
            for tile in list(variants(gated))[:limit]:
                seconds = product_seconds(layer, ids, gated, tile)
                name = "gate_up" if gated else "down"
                found.append({"tokens": tokens, "product": name, "tile": asdict(tile), "seconds": seconds})
                if (gated, tile.rows) not in best or seconds < best[gated, tile.rows][0]:
                    best[gated, tile.rows] = seconds, tile
        rows = min({rows for _, rows in best}, key=lambda rows: best[True, rows][0] + best[False, rows][0])
        for gated in (True, False):
            seconds, tile = best[gated, rows]
            print(f"{tokens} tokens, {'gate_up' if gated else 'down'}: {seconds * 1e6:.1f} us with {tile}")
    return found


@output.command
def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 0 when kernels agree with their references and figures were taken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=("llada2-mini", "sdar-30b-a3b"), default="llada2-mini")
    parser.add_argument("--tune", action="store_true", help="try tiles")
    parser.add_argument("--tiny", action="store_true", help="small shapes, also on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    output.check_file(options.json)
    device = "cuda" if need_cuda(options.tiny, "use --tiny, which runs in Triton's interpreter") else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["HERALD_KERNELS"] = "triton"

    from bench_longctx import machine
    from bench_longctx.kernels import timing

    check(device)
    limits = timing.measure_limits(options.tiny)
    all_tokens = TINY_TOKENS if options.tiny else TOKENS
    layer = Layer(shape(options.preset, options.tiny), all_tokens[0], device)
    taken = list(figures(layer, all_tokens, limits))
    print(timing.table(taken), flush=True)
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "preset": options.preset,
        "limits": vars(limits),
        "figures": [each.as_json() for each in taken],
    }
    if options.tune:
        tuned = TINY_TOKENS[:1] if options.tiny else TUNED_TOKENS
        report["variants"] = tune(layer, tuned, 2 if options.tiny else 1000)
    output.write_report(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

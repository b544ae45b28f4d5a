"""Speed of the GPU kernels beside the limits of the hardware, measured inside CUDA graphs.

    python -m bench_longctx.kernels.bench_kernels --json kernels.json
    python -m bench_longctx.kernels.bench_kernels --only attention,prefill
    python -m bench_longctx.kernels.bench_kernels --step
    python -m bench_longctx.kernels.bench_kernels --tune all --json tune.json

Tables are in microseconds and multiples of the floor: the larger of bytes / copy rate and FLOP / product
rate. ``--tune`` tries variants: of tiles and pieces (attention), of the element-wise kernels (small), of the
products' library (step), or all of these. Tiles and strips are entered in ``herald_kernels/ops/tiles.py``.

Kernels are held to their references on small shapes first. ``--tiny`` uses small shapes; without a CUDA
device it runs the Triton kernels in their interpreter, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench_longctx import output
from bench_longctx.options import need_cuda

PARTS = ("attention", "prefill", "fusion", "small", "products")
TUNED = ("attention", "small", "step")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true", help="small shapes, also on a CPU")
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}, with commas between")
    parser.add_argument("--step", action="store_true", help="a whole step of an 8B model, not single kernels")
    parser.add_argument("--tune", choices=[*TUNED, "all"], help="try variants, not single kernels")
    options = parser.parse_args(arguments)
    options.parts = options.only.split(",") if options.only else [] if options.step or options.tune else PARTS
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"--only {part}: unknown; use some of {','.join(PARTS)}")
    return options


@output.command
def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 0 when kernels agree with their references and figures were taken."""
    options = parse(arguments)
    output.check_file(options.json)
    device = "cuda" if need_cuda(options.tiny, "use --tiny, which runs in Triton's interpreter") else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["HERALD_KERNELS"] = "triton"

    from bench_longctx import machine
    from bench_longctx.kernels import attention, products, small, step, timing, tune, tune_small

    attention.check(device)
    small.check(device)
    limits = timing.measure_limits(options.tiny)
    print(
        f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s, products {limits.flop_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    makers = {
        "attention": attention.resident_figures,
        "prefill": attention.prefill_figures,
        "fusion": small.fusion_figures,
        "small": small.small_figures,
        "products": products.product_figures,
    }
    tuned = TUNED if options.tune == "all" else (options.tune,)
    variants = tune.tune(device, options.tiny) if "attention" in tuned else []
    variants += tune_small.tune_small(device, options.tiny) if "small" in tuned else []
    chosen = [makers[part] for part in options.parts] + ([step.step_figures] if options.step else [])
    figures = []
    for maker in [*chosen, *([products.choice_figures] if "step" in tuned else [])]:
        taken = list(maker(device, options.tiny, limits))
        figures += taken
        for part in dict.fromkeys(one.part for one in taken):
            print("\n" + timing.table([one for one in taken if one.part == part]), flush=True)
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "limits": vars(limits),
        "figures": [taken.as_json() for taken in figures],
        "variants": variants,
    }
    output.write_report(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

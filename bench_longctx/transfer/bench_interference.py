"""What moving rows costs the block that is being denoised, for every way of moving them.

    python -m bench_longctx.transfer.bench_interference --json interference.json

Four sections (`--only` picks some): `pool`, how long 16 GiB of pinned memory take to be ready; `alone`, GB/s
of each way with the device idle; `beside`, each way while a stand-in for denoising steps (the GEMMs of an 8B
model as one CUDA graph) runs back to back; `partition`, the same with the GEMMs kept off a few SMs. The
figure that decides is `ms_per_gb`: milliseconds of denoising lost to each GB that came meanwhile.

Rows are 512 bytes. Each gather kernel is compared with torch's indexing before it is timed, the bulk one
first of all in a process of its own. A variant that fails is reported and the rest goes on; what no longer
fits into `--seconds` is left out and named. With `--tiny` everything is small, and a CUDA device is not
needed; without one only the thread that stands for a copy stream is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench_longctx import output
from bench_longctx.options import at_least, need_cuda, seconds
from bench_longctx.transfer.report import SECTIONS, table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there, after every section")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument(
        "--requests", type=at_least(1), nargs="+", default=[1, 8, 20], help="batch sizes of a step"
    )
    parser.add_argument("--seconds", type=seconds, default=140.0, help="begin no variant later (default 140)")
    parser.add_argument("--probe", action="store_true", help="only check the bulk kernel, then end")
    return parser.parse_args(arguments)


@output.command
def main(arguments: list[str] | None = None) -> int:
    """Run the sections and print their table."""
    options = parse(arguments)
    output.check_file(options.json)
    if options.probe:
        need_cuda(False, "leave --probe out: what it checks is a kernel of the device")
    need_cuda(options.tiny)

    from bench_longctx.transfer.interference import Bench
    from bench_longctx.transfer.sections import RUN, probe, run_probe

    bench = Bench(options)
    if options.probe:
        probe(bench)
        return 0
    needs_rows = any(section != "pool" for section in options.only)
    if needs_rows and bench.cuda:
        run_probe(bench)
    if "pool" in options.only:
        RUN["pool"](bench)
        bench.write()
    if needs_rows:
        bench.open()
    for section in SECTIONS[1:]:
        if section in options.only:
            RUN[section](bench)
            bench.write()
    if text := table(bench.results):
        print(text)
    print(f"\n{time.perf_counter() - bench.started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())

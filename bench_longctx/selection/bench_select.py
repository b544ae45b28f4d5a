"""Speed of selection on this CPU: scans, plans of updates, and what a finished block costs.

    python -m bench_longctx.selection.bench_select --json FILE [--tiny]

Scans an index larger than the caches (36 layers x 8 KV heads x 32K rows) and one that fits them, top-k
included, with every instruction set of the C++ extension (if it is built) and with numba. A token-head is one
token's key in one KV head of one layer. Bytes are codes, scales and means that pass by; the same index read
by a plain loop says what the memory gives. Medians; --tiny is for a test of the script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench_longctx import output


def line(result: dict[str, Any]) -> str:
    """One result as it is printed."""
    if result["what"] == "read":
        return f"plain read, {result['where']}: {result['bytes_per_second'] / 1e9:.1f} GB/s"
    text = f"{result['what']:13s} {result['path']:14s} {result['threads']:2d} threads"
    if result["what"] != "select":
        return f"{text}  {result['seconds'] * 1e3:8.3f} ms  {result.get('bits', '')}"
    return (
        f"{text}  {result['bits']:2d} bits  {result['query_rows']:3d} query rows, {result['where']:8s}"
        f"{result['seconds'] * 1e3:9.2f} ms  {result['token_heads_per_second'] / 1e9:6.3f} G token-heads/s"
        f"  {result['bytes_per_second'] / 1e9:6.1f} GB/s"
    )


@output.command
def main(arguments: list[str] | None = None) -> int:
    """Measure everything and print it as it comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this script")
    options = parser.parse_args(arguments)
    output.check_file(options.json)

    from bench_longctx import machine
    from bench_longctx.selection.measure import measure
    from herald.kvstore.native import find_native

    native = find_native()
    print(native.reason if native.module is None else f"extension: {native.module.scan_isas()}")
    results = []
    for result in measure(options.tiny):
        results.append(result)
        print(line(result), flush=True)
    output.write_report(options.json, {"machine": machine.describe(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())

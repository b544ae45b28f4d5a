"""The suites of decoding, of the dense engine, and of prefill, each for a process of its own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench_longctx.throughput import decode, prefill
from bench_longctx.throughput.options import BLOCK, BUDGET, MAX_POSITIONS, offload_of, sizes
from bench_longctx.throughput.synthetic import begin_without_prefill, make_engine, random_model
from herald.config import OffloadConfig
from herald.engine.engine import Engine
from herald.errors import HostPoolTooSmall
from herald.models import BlockModel

GIB = 1 << 30
# Device memory that dense and offloading engine may each use.
CAP_BYTES = 80 * GIB


def load(args: argparse.Namespace) -> BlockModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return random_model(args.preset, BLOCK, MAX_POSITIONS, device, args.tiny)


def huge_page_bytes() -> int:
    """Bytes of this process that lie on huge pages; scans of 4 KiB pages are slower."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def runs_of(args: argparse.Namespace, most: int, long_batch: int) -> list[decode.Run]:
    """What is measured of decoding, each case once; the first one sets the engine up.

    Args:
        most: the largest batch at the short context.
        long_batch: the largest one at the long context.
    """
    short, long, usual, _ = sizes(args.tiny)
    whole, fast = decode.Run(short, most, 20, args.blocks), decode.Run(short, most, 8, args.blocks)
    at_length = [
        decode.Run(long, long_batch, 20, args.blocks),
        decode.Run(long, 1, 20, args.blocks),
        decode.Run(long, long_batch, 8, args.blocks),
    ]
    if args.quick:
        runs = [whole, fast, decode.Run(short, 1, 20, args.blocks)]
    elif args.contexts == "long":
        runs = at_length
    else:
        runs = [whole, fast]
        for batch in (most, *(batch for batch in usual if batch < most)):
            for kind in (decode.FULL, decode.LANES_ONLY, decode.BARE):
                runs.append(decode.Run(short, batch, 20, args.blocks, kind))
        if args.contexts == "both":
            runs += at_length
    return list(dict.fromkeys(runs))


def run_decode(args: argparse.Namespace) -> dict[str, Any]:
    """The offloading engine: three batches at the short context, two at the long one."""
    model = load(args)
    begin_without_prefill()
    began = time.perf_counter()
    engine, runs, first = begin_decode(args, model)
    ready = time.perf_counter() - began
    found = [first]
    for run in runs[1:]:
        found.append(decode.measure(engine, run))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    busy = {}
    short = sizes(args.tiny)[0]
    if model.device.type == "cuda" and args.contexts != "long":
        for batch in sorted({1, runs[0].batch}):
            busy[str(batch)] = decode.busy_share(engine, decode.Run(short, batch, 20))
    store = engine.memory.store
    assert store is not None
    facts = {
        "setup_seconds": ready,
        "transfer": store.transfer.name,
        "transfer_why": store.transfer_why,
        "selection": store.selector.isa,
        "scan_on_device": store.selector.device_scan is not None,
        "scan_on_device_why": store.selector.device_reason,
        "layers_of_index_on_device": 0
        if store.selector.device_scan is None
        else store.selector.device_scan.layers_held,
        "pool_bytes": store.pool.num_bytes,
        "index_bytes": store.index.num_bytes,
        "weight_bytes": model.weight_bytes,
        "huge_page_bytes": huge_page_bytes(),
    }
    engine.close()
    return {"facts": facts, "runs": found, "busy": busy}


def begin_decode(
    args: argparse.Namespace, model: BlockModel
) -> tuple[Engine, list[decode.Run], dict[str, Any]]:
    """An engine with as many requests as this host holds, its runs, and what the first of them found.

    Raises:
        HostPoolTooSmall: four fifths of the largest batch do not fit either.
    """
    short, long, usual, long_batch = sizes(args.tiny)
    wanted = args.batch or usual[0]
    if args.batch:
        long_batch = min(long_batch, max(1, args.batch * short // long))
    batches = list(dict.fromkeys((wanted, max(1, wanted * 4 // 5))))
    for batch in batches:
        runs = runs_of(args, batch, long_batch)
        engine = make_engine(model, offload_of(args), batch, args.shared)
        try:
            return engine, runs, decode.measure(engine, runs[0])
        except HostPoolTooSmall as error:
            engine.close()
            if batch == batches[-1]:
                raise
            print(f"batch {batch} does not fit this host: {error}", file=sys.stderr)
    raise AssertionError("there is a last batch")


def run_dense(args: argparse.Namespace) -> dict[str, Any]:
    """The same engine with all KV on the device: the largest batch under the cap, and one request."""
    model = load(args)
    begin_without_prefill()
    config = model.config
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    found = []
    short, long = sizes(args.tiny)[:2]
    for prefix in (short,) if args.quick else (short, long):
        room = CAP_BYTES - model.weight_bytes - 2 * GIB  # logits, graphs, workspace
        positions = prefix + BLOCK * (decode.WARM_BLOCKS + args.blocks + 2)
        most = 2 if args.tiny else int(room // (token_bytes * positions))
        for batch in dict.fromkeys((most, 1)):
            engine = make_engine(model, OffloadConfig(enabled=False), batch, 0.0)
            found.append(decode.measure(engine, decode.Run(prefix, batch, 20, args.blocks)))
            if batch == most:
                found.append(decode.measure(engine, decode.Run(prefix, batch, 8, args.blocks)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            engine.close()
    return {"runs": found}


def run_prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts of both contexts, or of the short one, with and without the copies to the host."""
    model = load(args)
    short, long = sizes(args.tiny)[:2]
    chunk = 256 if args.tiny else 4096
    found = []
    for tokens, runs in ((short, 3), (long, 1))[: 1 if args.quick else 2]:
        found.append(prefill.measure(model, tokens, OffloadConfig(kv_budget=BUDGET), chunk, runs))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        found.append(prefill.measure(model, tokens, OffloadConfig(enabled=False), chunk, runs))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"runs": found}


SUITES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "decode": run_decode,
    "dense": run_dense,
    "prefill": run_prefill,
}

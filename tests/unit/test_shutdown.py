"""A process that ends while threads of ours are in native code ends as if they were not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from herald.kvstore.native import find_native

ROOT = Path(__file__).resolve().parents[2]

# Each child begins threads of its own and ends like any program, through the interpreter's end.
FORKS = """
import os, sys, time
import numpy as np
import torch
from herald.kvstore import HostPool, KeyIndex, RowLayout
from herald.select import BackgroundWorker, Selector, device_scan
from herald.transfer.worker import FifoWorker

{prepare}

failed = []
for turn in range({count}):
    child = os.fork()
    if child == 0:
        {child}
        time.sleep(0.002 * turn)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        failed.append((turn, os.waitstatus_to_exitcode(status)))
print(failed)
"""

PREPARE = """
pool = HostPool(RowLayout(4, 2, 64, 32, torch.float32), 200, pin=False)
index = KeyIndex(pool, 8, num_threads=1)
pages = np.arange(200, dtype=np.int32)
index.append_span(pages, 0, 6400)
queries, lse = np.ones((4, 8, 4, 64), np.float32), np.zeros((4, 8, 4), np.float32)

def begin():
    on_device = torch.device("cpu") if turn % 2 else None
    selector = Selector(pool, index, num_threads=1, device=on_device, device_bytes=index.num_bytes)
    if selector.device_scan is not None:
        selector.device_scan._least = 0
    for worker in (BackgroundWorker(), BackgroundWorker()):
        for _ in range(100):
            worker.submit(selector.select, pages, 0, 6400, 9, queries, lse, 0.3)
    writer = FifoWorker("writes")
    for _ in range(20):
        writer.submit(lambda: index.append_span(pages, 0, 640))
"""

ENGINE = """
import asyncio, sys
from herald import AsyncLLM, SamplingParams

async def ask():
    llm = AsyncLLM("tiny", device="cpu")
    async for output in llm.generate([5] * 3000, SamplingParams(max_tokens=400, ignore_eos=True)):
        print(len(output.token_ids), flush=True)
        sys.exit(0)

asyncio.run(ask())
"""

LOAD = """
import asyncio, time, torch
from herald.serve.lifecycle import Lifecycle

def load():
    end = time.monotonic() + 1
    while time.monotonic() < end:
        torch.ones(3000, 3000).exp()
    raise ValueError("no such model")

async def serve():
    Lifecycle(load, 1.0).start()
    await asyncio.sleep(0.3)

asyncio.run(serve())
"""


def run(program: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.skipif(find_native().module is None, reason=find_native().reason)
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_threads_in_the_extension_end_first(count: int) -> None:
    ended = run(FORKS.format(prepare=PREPARE, child="begin()", count=count))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]", f"{ended.stderr} SIGABRT is {-signal.SIGABRT}"
    assert not ended.stderr


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_an_engine_that_nobody_closed(count: int) -> None:
    for _ in range(count):
        ended = run(ENGINE)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout and not ended.stderr


def test_a_server_that_ends_while_its_model_is_loaded() -> None:
    ended = run(LOAD)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_fork_ends_without_the_threads_it_has_not() -> None:
    """And says so where it is asked for their work."""
    child = """
        try:
            worker.submit(print)
        except Exception as error:
            assert "a forked process has none" in str(error), error
        else:
            sys.exit(9)
    """
    prepare = "worker = BackgroundWorker(); worker.submit(lambda: None).result()"
    ended = run(FORKS.format(prepare=prepare, child=child.strip("\n").lstrip(), count=3))
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr

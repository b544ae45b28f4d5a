"""A process with engines on a GPU that nobody closed ends as if they had been."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import asyncio, sys
from herald import AsyncLLM, OffloadConfig, SamplingParams
from herald.select import device_scan

device_scan.LEAST = 0
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)

async def ask(llm):
    async for output in llm.generate([5] * 6000, PARAMS):
        if len(output.token_ids) > 60:
            return

async def main():
    options = [OffloadConfig(index_device_bytes=held) for held in (0, 1 << 30)]
    models = [AsyncLLM("tiny", device="cuda", offload=each) for each in options]
    tasks = [asyncio.ensure_future(ask(llm)) for llm in models for _ in range(3)]
    await tasks[0]
    sys.exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("turn", range(3))
def test_engines_that_nobody_closed(turn: int) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0 and "terminate" not in ended.stderr, ended.stderr

"""The CUDA source compiles for every row size, and keeps its loads in flight. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from herald.transfer.zero_copy import gather_source, widest_piece

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def compile_gather(tmp_path: Path, row_bytes: int, in_flight: int = 8, threads: int = 512) -> str:
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "gather.cubin")]
    macros = {
        "ROW_BYTES": row_bytes,
        "PIECE": widest_piece(row_bytes),
        "IN_FLIGHT": in_flight,
        "THREADS": threads,
    }
    command += [f"-D{name}={value}" for name, value in macros.items()]
    result = subprocess.run([*command, str(gather_source())], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_it_includes_nothing() -> None:
    assert "#include" not in gather_source().read_text(), "NVRTC has no headers to find"


@needs_nvcc
@pytest.mark.parametrize("row_bytes", [512, 96, 24, 20, 6, 7])
def test_it_compiles_for_every_access_width(tmp_path: Path, row_bytes: int) -> None:
    log = compile_gather(tmp_path, row_bytes)
    assert "warning" not in log
    assert " 0 bytes spill stores" in log


@needs_nvcc
@pytest.mark.parametrize(("in_flight", "threads"), [(8, 512), (16, 512), (8, 1024)])
def test_loads_stay_in_flight(tmp_path: Path, in_flight: int, threads: int) -> None:
    """Fewer registers than the data of all loads would mean that stores were moved between the loads."""
    log = compile_gather(tmp_path, 512, in_flight, threads)
    used = re.search(r"Used (\d+) registers", log)
    assert used is not None and int(used[1]) > 4 * in_flight + 16
    assert " 0 bytes spill stores" in log

"""The CUDA sources compile, keep their loads in flight, and move the rows that they are told to.

Needs nvcc for the first two and a C++ compiler for the last, no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from herald.transfer.gather_kernel import BULK, SOURCES, GatherKernel, kernel_source, widest_piece

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
EMULATOR = Path(__file__).with_name("warps_on_cpu.cpp")


def defines(kernel: GatherKernel, row_bytes: int) -> list[str]:
    macros = kernel.macros(row_bytes, widest_piece(row_bytes))
    return [f"-D{name}={value}" for name, value in macros.items()]


def compile_gather(tmp_path: Path, kernel: GatherKernel, row_bytes: int) -> str:
    """What nvcc says; fails where it warns."""
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "gather.cubin")]
    command += [*defines(kernel, row_bytes), str(kernel_source(kernel))]
    result = subprocess.run(command, capture_output=True, text=True)
    log = result.stdout + result.stderr
    assert result.returncode == 0 and "warning" not in log, log
    assert " 0 bytes spill stores" in log
    return log


@pytest.mark.parametrize("name", SOURCES)
def test_it_includes_nothing(name: str) -> None:
    source = kernel_source(GatherKernel(name, warps=1, depth=2))  # type: ignore[arg-type]
    assert "#include" not in source.read_text(), "NVRTC has no headers to find"


@needs_nvcc
@pytest.mark.parametrize("row_bytes", [512, 96, 24, 20, 6, 7])
def test_registers_compile_for_every_access_width(tmp_path: Path, row_bytes: int) -> None:
    compile_gather(tmp_path, GatherKernel("registers", 16, 8), row_bytes)


@needs_nvcc
@pytest.mark.parametrize("row_bytes", [16, 96, 512, 1024])
@pytest.mark.parametrize("kernel", [BULK, GatherKernel("bulk", 4, 3, 32)])
def test_bulk_compiles_for_multiples_of_16_bytes(
    tmp_path: Path, kernel: GatherKernel, row_bytes: int
) -> None:
    compile_gather(tmp_path, kernel, row_bytes)


@needs_nvcc
@pytest.mark.parametrize(("in_flight", "warps"), [(8, 16), (16, 16), (8, 32)])
def test_loads_stay_in_flight(tmp_path: Path, in_flight: int, warps: int) -> None:
    """Fewer registers than the data of all loads would mean that stores were moved between the loads."""
    log = compile_gather(tmp_path, GatherKernel("registers", warps, in_flight), 512)
    used = re.search(r"Used (\d+) registers", log)
    assert used is not None and int(used[1]) > 4 * in_flight + 16


def run_on_cpu(tmp_path: Path, kernel: GatherKernel, row_bytes: int) -> Path:
    """The kernel as a program of the emulator."""
    program = tmp_path / "gather"
    command = ["g++", "-std=c++20", "-O1", "-pthread", *defines(kernel, row_bytes)]
    command += [f'-DSOURCE="{kernel_source(kernel)}"', str(EMULATOR), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    if "barrier: No such file" in result.stderr:
        pytest.skip("this compiler has no C++20 library")
    assert result.returncode == 0, result.stderr
    return program


@needs_gxx
@pytest.mark.parametrize(
    ("kernel", "row_bytes"),
    [
        (GatherKernel("bulk", warps=1, depth=2, width=1), 96),
        (GatherKernel("bulk", warps=2, depth=3, width=5), 16),
        (GatherKernel("bulk", warps=3, depth=4, width=32), 96),
        (BULK, 48),
    ],
    ids=str,
)
def test_every_row_lands_and_nothing_else_changes(
    tmp_path: Path, kernel: GatherKernel, row_bytes: int
) -> None:
    """The source on a CPU, under copies that are as late as they may be."""
    program = run_on_cpu(tmp_path, kernel, row_bytes)
    rng = np.random.default_rng(0)
    for n, blocks in ((1, 1), (5, 3), (33, 1), (97, 2), (400, 2)):
        pairs = np.stack([rng.integers(0, 1000, n), rng.permutation(450)[:n]], axis=1)
        text = f"1000 450 {blocks} {n}\n" + "\n".join(f"{a} {b}" for a, b in pairs)
        result = subprocess.run([program], input=text, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, f"n={n}, blocks={blocks}: {result.stdout}{result.stderr}"

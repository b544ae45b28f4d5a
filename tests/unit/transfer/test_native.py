"""The extension's row gather against numpy: as installed, and compiled here so that it is always tried."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from herald.transfer.gather_kernel import REGISTERS, kernel_source
from herald.transfer.packing import native_module

SOURCES = Path(__file__).parents[3] / "csrc"
ISAS = ("avx512", "avx2", "scalar")
ROW_BYTES = (1, 7, 31, 32, 33, 64, 96, 127, 128, 200, 512, 520, 1024)


def build(folder: Path) -> ModuleType:
    """The extension compiled from the checkout into ``folder``."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    if not SOURCES.is_dir():
        pytest.skip("the tests run outside a checkout")
    target = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    command = [compiler, *flags, "-ffp-contract=off", "-pthread", *includes, *sources, "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    spec = importlib.util.spec_from_file_location("_native", target)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["installed", "compiled"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if request.param == "compiled":
        return build(tmp_path_factory.mktemp("native"))
    module = native_module()
    if module is None:
        pytest.skip("herald._native is not built (HERALD_BUILD_EXT=1 pip install -e .)")
    return module


def forced(native: ModuleType, isa: str) -> str:
    """``isa``, or a skip where this CPU lacks it."""
    needs = {"avx512": "avx512f", "avx2": "avx2"}.get(isa)
    if needs is not None and needs not in native.cpu_features():
        with pytest.raises(ValueError, match=isa):
            native.pack_rows(
                np.zeros((1, 4), np.uint8), np.zeros((1, 4), np.uint8), np.zeros(1, np.int64), 4, 1, isa
            )
        pytest.skip(f"this CPU has no {needs}")
    return isa


def aligned(rows: int, row_bytes: int, shift: int) -> np.ndarray:
    """A matrix of bytes whose first one is ``shift`` bytes past a multiple of 64."""
    raw = np.full(rows * row_bytes + 128, 0xEE, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    return raw[start : start + rows * row_bytes].reshape(rows, row_bytes)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_pack_rows_equals_numpy(native: ModuleType, isa: str, row_bytes: int) -> None:
    isa = forced(native, isa)
    rng = np.random.default_rng(row_bytes)
    for shift in (0, 1, 32):
        src = aligned(90, row_bytes, (shift * 3) % 64)
        src[:] = rng.integers(0, 256, src.shape)
        for threads in (1, 2, 3, 4):
            for n in (0, 1, 3, 61):
                ids = rng.integers(0, 90, n)
                dst = aligned(n + 2, row_bytes, shift)
                native.pack_rows(dst, src, ids, row_bytes, threads, isa)
                np.testing.assert_array_equal(dst[:n], src[ids])
                assert (dst[n:] == 0xEE).all(), "written past the last row"


def test_auto_is_the_best_there_is(native: ModuleType) -> None:
    has = {
        "avx512": "avx512f" in native.cpu_features(),
        "avx2": "avx2" in native.cpu_features(),
        "scalar": True,
    }
    assert native.active_isa() == next(isa for isa in ISAS if has[isa])


def test_calls_from_several_python_threads(native: ModuleType) -> None:
    from concurrent.futures import ThreadPoolExecutor

    src = np.random.default_rng(0).integers(0, 256, (200, 64), dtype=np.uint8)

    def gather(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(0, 200, 150)
        dst = np.empty((150, 64), np.uint8)
        native.pack_rows(dst, src, ids, 64, 3)
        return bool((dst == src[ids]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(gather, range(40)))


def test_a_forked_child_packs(native: ModuleType) -> None:
    """The threads of the parent do not exist in a child; it must not wait for them."""
    code = (
        "import os, sys, importlib.util, numpy as np\n"
        "spec = importlib.util.spec_from_file_location('_native', sys.argv[1])\n"
        "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "src = np.arange(640, dtype=np.uint8).reshape(10, 64); ids = np.arange(9, -1, -1)\n"
        "def go():\n"
        "    dst = np.zeros((10, 64), np.uint8); m.pack_rows(dst, src, ids, 64, 3)\n"
        "    return (dst == src[ids]).all()\n"
        "assert go()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if go() else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert native.__file__ is not None
    subprocess.run([sys.executable, "-c", code, native.__file__], check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"row_ids": np.array([0, 10])}, IndexError, r"row_ids\[1\] = 10 is outside src, which has 10 rows"),
        ({"row_ids": np.array([-1, 0])}, IndexError, r"row_ids\[0\] = -1"),
        ({"row_bytes": 16}, ValueError, "row_bytes"),
        ({"threads": 0}, ValueError, "threads"),
        ({"isa": "sse9"}, ValueError, "'sse9' is unknown here; use 'auto'"),
        ({"dst": np.zeros((1, 8), np.uint8)}, ValueError, "fewer rows"),
        ({"row_ids": np.zeros(2, np.int32)}, TypeError, "incompatible"),
        ({"dst": np.zeros((2, 8), np.int8)}, TypeError, "incompatible"),
        ({"src": np.zeros((8, 10), np.uint8).T}, TypeError, "incompatible"),
    ],
)
def test_bad_calls_are_refused(
    native: ModuleType, change: dict, error: type[Exception], message: str
) -> None:
    call = {
        "dst": np.zeros((2, 8), np.uint8),
        "src": np.zeros((10, 8), np.uint8),
        "row_ids": np.zeros(2, np.int64),
        "row_bytes": 8,
    }
    with pytest.raises(error, match=message):
        native.pack_rows(**(call | change))


def test_a_read_only_buffer_is_refused(native: ModuleType) -> None:
    dst = np.zeros((2, 8), np.uint8)
    dst.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        native.pack_rows(dst, np.zeros((2, 8), np.uint8), np.zeros(2, np.int64), 8)


def test_both_sources_stand_together() -> None:
    if not SOURCES.is_dir():
        pytest.skip("the tests run outside a checkout")
    assert kernel_source(REGISTERS).name == "gather.cu"

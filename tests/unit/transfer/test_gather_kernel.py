"""What a gather kernel is compiled with, and which rows and devices it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from herald.errors import InvalidOption
from herald.transfer import gather_kernel as module
from herald.transfer.gather_kernel import GatherKernel, kernel_source, widest_piece

REGISTERS = GatherKernel("registers", warps=16, depth=8)
BULK = GatherKernel("bulk", warps=4, depth=3, width=32)


@pytest.mark.parametrize(
    ("row_bytes", "addresses", "piece"),
    [
        (512, (0, 4096), 16),
        (48, (64,), 16),
        (24, (0,), 8),
        (20, (0,), 4),
        (6, (0,), 2),
        (7, (0,), 1),
        (512, (0, 8), 8),
        (512, (2, 16), 2),
        (512, (1,), 1),
    ],
)
def test_widest_piece(row_bytes: int, addresses: tuple[int, ...], piece: int) -> None:
    assert widest_piece(row_bytes, *addresses) == piece


@pytest.mark.parametrize(
    "options",
    [
        {"name": "triton", "warps": 1, "depth": 2},
        {"name": "registers", "warps": 0, "depth": 2},
        {"name": "registers", "warps": 33, "depth": 2},
        {"name": "registers", "warps": 1, "depth": 0},
        {"name": "bulk", "warps": 1, "depth": 1},
        {"name": "bulk", "warps": 1, "depth": 2, "width": 33},
        {"name": "bulk", "warps": 1, "depth": 2, "width": 0},
    ],
)
def test_shapes_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="use"):
        GatherKernel(**options)  # type: ignore[arg-type]


def test_sizes() -> None:
    assert REGISTERS.bytes_under_way(512) == 512 * 8 * 16
    assert REGISTERS.bytes_under_way(24, 8) == 512 * 8 * 8
    assert REGISTERS.shared_bytes(512) == 0
    assert BULK.bytes_under_way(512) == 4 * 3 * 32 * 512
    # An id of 8 bytes a row, a barrier of 8 bytes a stage.
    assert BULK.shared_bytes(512) == 4 * 3 * (32 * (512 + 8) + 8)
    assert 190 << 10 < module.BULK.shared_bytes(512) <= 200 << 10


def test_what_a_kernel_cannot_move() -> None:
    for kernel in (REGISTERS, BULK):
        assert kernel.problem((9, 0), 512, 16) == ""
        assert kernel.problem((10, 0), 512, 16) == ""
    assert REGISTERS.problem((7, 0), 7, 1) == ""
    assert "compute capability (9, 0), not (8, 9)" in BULK.problem((8, 9), 512, 16)
    assert "multiples of 16 bytes, and rows allow 8" in BULK.problem((9, 0), 24, 8)
    assert "shared memory" in BULK.problem((9, 0), 1024, 16)


@pytest.mark.parametrize("kernel", [REGISTERS, BULK])
def test_the_source_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: GatherKernel) -> None:
    assert module.FUNCTIONS[kernel.name] + "(" in kernel_source(kernel).read_text()
    package = tmp_path / "herald"
    monkeypatch.setattr(module, "__file__", str(package / "transfer" / "gather_kernel.py"))
    with pytest.raises(FileNotFoundError, match="_csrc"):
        kernel_source(kernel)
    installed = package / "_csrc" / module.SOURCES[kernel.name]
    installed.parent.mkdir(parents=True)
    installed.write_text("as a wheel has it")
    assert kernel_source(kernel) == installed

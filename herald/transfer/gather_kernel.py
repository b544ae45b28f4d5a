"""The kernels that gather host rows: what they are compiled with, and how they are launched."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from herald.config import check

# Shared memory that one block can have on Hopper and the data centre's Blackwell.
MAX_SHARED_BYTES = 227 << 10
PIECE_BYTES = 16
LANES = 32

SOURCES = {"registers": "gather.cu", "bulk": "gather_bulk.cu"}
FUNCTIONS = {"registers": "gather_rows", "bulk": "gather_rows_bulk"}
# (major, minor) of the oldest device that has the instructions.
OLDEST = {"registers": (5, 0), "bulk": (9, 0)}
# A stream holds about a thousand launches, and who issues more waits inside the driver. A move longer than
# this many pieces gets larger ones.
MAX_LAUNCHES = 512


@dataclass(frozen=True)
class GatherKernel:
    """A gather kernel and how much of it a block has under way.

    Args:
        name: ``"registers"``: any device and rows, what is under way waits in registers. ``"bulk"``: sm_90,
            in shared memory; rows that are multiples of 16 bytes, at addresses that are.
        warps: of a block.
        depth: loads that a thread has outstanding (``"registers"``), stages of a warp's ring (``"bulk"``).
        width: rows of a stage (``"bulk"``); of no meaning for ``"registers"``.

    Raises:
        InvalidOption: a number is out of range.
    """

    name: Literal["registers", "bulk"]
    warps: int
    depth: int
    width: int = 1

    def __post_init__(self) -> None:
        check(self.name in SOURCES, "name", self.name, f"use one of {', '.join(SOURCES)}")
        check(1 <= self.warps <= 32, "warps", self.warps, "use 1 to 32")
        least = 2 if self.name == "bulk" else 1
        check(self.depth >= least, "depth", self.depth, f"use {least} or more")
        check(1 <= self.width <= LANES, "width", self.width, f"use 1 to {LANES}")

    def bytes_under_way(self, row_bytes: int, piece: int = PIECE_BYTES) -> int:
        """Bytes of rows that one block has on their way at once."""
        if self.name == "bulk":
            return self.warps * self.depth * self.width * row_bytes
        return self.warps * LANES * self.depth * piece

    def shared_bytes(self, row_bytes: int) -> int:
        """Dynamic shared memory of a block: the rings, an id a row and a barrier a stage."""
        if self.name == "registers":
            return 0
        return self.bytes_under_way(row_bytes) + self.warps * self.depth * (8 * self.width + 8)

    def macros(self, row_bytes: int, piece: int = PIECE_BYTES) -> dict[str, int]:
        """What the source is compiled with."""
        if self.name == "registers":
            shape = {"PIECE": piece, "IN_FLIGHT": self.depth, "THREADS": LANES * self.warps}
        else:
            shape = {"ROWS": self.width, "STAGES": self.depth, "WARPS": self.warps}
        return {"ROW_BYTES": row_bytes, **shape}

    def problem(self, capability: tuple[int, int], row_bytes: int, piece: int) -> str:
        """Why the kernel cannot move such rows on a device, or "" when it can.

        Args:
            capability: of the device, as `torch.cuda.get_device_capability` gives it.
            row_bytes: of a row.
            piece: widest access that rows and addresses allow (`widest_piece`).
        """
        if capability < OLDEST[self.name]:
            return f"the {self.name} kernel needs compute capability {OLDEST[self.name]}, not {capability}"
        if self.name == "bulk" and piece < PIECE_BYTES:
            return f"the bulk kernel moves multiples of {PIECE_BYTES} bytes, and rows allow {piece}"
        if self.shared_bytes(row_bytes) > MAX_SHARED_BYTES:
            return f"{self.shared_bytes(row_bytes)} bytes of shared memory are more than {MAX_SHARED_BYTES}"
        return ""


REGISTERS = GatherKernel("registers", warps=16, depth=8)
# 200 KiB of shared memory for rows of 512 bytes; chosen by bench_longctx/transfer/bench_interference.py.
BULK = GatherKernel("bulk", warps=4, depth=4, width=24)


def widest_piece(row_bytes: int, *addresses: int) -> int:
    """Bytes of the widest access (16, 8, 4, 2 or 1) that rows at these addresses allow."""
    piece = PIECE_BYTES
    while any(value % piece for value in (row_bytes, *addresses)):
        piece //= 2
    return piece


def kernel_source(kernel: GatherKernel) -> Path:
    """The kernel's source: inside an installed package, or in the checkout of an editable install.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    name = SOURCES[kernel.name]
    places = (package / "_csrc" / name, package.parent / "csrc" / name)
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, places))}; reinstall the package")


def launch_rows(n: int, most: int) -> np.ndarray:
    """Rows of each launch of a move.

    Args:
        n: rows of the move, at least 1.
        most: rows of a launch, 0 for all in one; more where that would take over `MAX_LAUNCHES`.

    Returns:
        int64 [launches], all but the last one equal; their sum is ``n``.
    """
    rows = max(most, -(-n // MAX_LAUNCHES)) if most else n
    return np.minimum(rows, n - np.arange(0, n, rows))


class CompiledGather:
    """A gather kernel for one row size, ready on the current device.

    Args:
        kernel: which one.
        row_bytes: of a row.
        piece: see `GatherKernel.problem`.
    """

    def __init__(self, kernel: GatherKernel, row_bytes: int, piece: int) -> None:
        self._threads = LANES * kernel.warps
        self._row_bytes = row_bytes
        self._bytes_under_way = kernel.bytes_under_way(row_bytes, piece)
        self._shared_bytes = kernel.shared_bytes(row_bytes)
        cupy = importlib.import_module("cupy")
        module = cupy.RawModule(
            code=kernel_source(kernel).read_text(),
            options=tuple(f"-D{name}={value}" for name, value in kernel.macros(row_bytes, piece).items()),
        )
        self._function = module.get_function(FUNCTIONS[kernel.name])
        # CuPy compiles when it needs to: here, rather than inside the first block.
        self._function.max_dynamic_shared_size_bytes = self._shared_bytes
        # A move takes many launches. Called like a function, a CuPy kernel looks itself up and wraps every
        # argument each time; the driver takes arguments that were laid out beforehand.
        self._handle: int = self._function.kernel.ptr
        self._launch = cupy.cuda.driver.launchKernel

    def launch(
        self, stream: int, blocks: int, src: int, dst: int, src_ids: int, dst_ids: int, n: int, most: int = 0
    ) -> None:
        """Put a gather of ``n`` rows on a stream of the current device.

        Args:
            stream: handle of the stream (`torch.cuda.Stream.cuda_stream`).
            blocks: thread blocks, of which no more are launched than have something to do.
            src, dst: addresses of row 0 of each side.
            src_ids, dst_ids: device addresses of ``n`` int64 ids each.
            n: rows, at least 1.
            most: rows of one launch, 0 for one launch of all (`launch_rows`).
        """
        counts = launch_rows(n, most)
        offsets = 8 * (np.cumsum(counts) - counts)
        # The driver copies the arguments before a launch returns, so the arrays may go after the loop.
        arguments = np.empty((len(counts), 5), np.int64)
        for column, values in enumerate((src, dst, src_ids + offsets, dst_ids + offsets, counts)):
            arguments[:, column] = values
        places = arguments.ctypes.data + 8 * np.arange(arguments.size)
        useful = -(-counts * self._row_bytes // self._bytes_under_way)
        begin, step = places.ctypes.data, 8 * arguments.shape[1]
        launch, handle, threads, shared = self._launch, self._handle, self._threads, self._shared_bytes
        for at, grid in enumerate(np.minimum(blocks, useful).tolist()):
            launch(handle, grid, 1, 1, threads, 1, 1, shared, stream, begin + at * step, 0)

"""Rows read straight out of page-locked host memory by a kernel on the copy stream."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from herald.errors import InvalidOption
from herald.transfer.base import RowMove, Ticket
from herald.transfer.cuda import CudaTransfer, Ring
from herald.transfer.streams import DeviceStreams

# Ids of one launch, and how many launches may be under way before `submit` blocks: 16 bytes a row of
# page-locked and of device memory, 16 MiB each.
CHUNK_ROWS = 262_144
RING_SLOTS = 4
# cudaMemoryTypeHost, in cudaPointerAttributes.
HOST_MEMORY = 1


class IdSlot:
    """Row ids of one launch: source ids, then destination ids, on the host and on the device."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.empty(2 * CHUNK_ROWS, dtype=torch.int64, pin_memory=True)
        self.array = self.host.numpy()
        self.device = torch.empty(2 * CHUNK_ROWS, dtype=torch.int64, device=device)
        self.busy: Any = None


def gather_source() -> Path:
    """The kernel's source: inside an installed package, or in the checkout of an editable install.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "_csrc" / "gather.cu", package.parent / "csrc" / "gather.cu")
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"gather.cu is in none of {', '.join(map(str, places))}; reinstall the package")


def zero_copy_problem(pool_rows: torch.Tensor, device: torch.device) -> str:
    """Why a kernel on ``device`` cannot read ``pool_rows``, or "" when it can."""
    if device.type != "cuda":
        return f"zero_copy needs a CUDA device, not {device}"
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        return f"zero_copy needs CuPy ({error})"
    first = pool_rows.data_ptr()
    with torch.cuda.device(device):
        for address in (first, first + pool_rows.nbytes - 1):
            try:
                memory = runtime.pointerGetAttributes(address)
            except runtime.CUDARuntimeError as error:
                return f"the host pool is unknown to CUDA ({error})"
            if memory.type != HOST_MEMORY:
                return "the host pool is not page-locked"
            if memory.devicePointer != address:
                return "the device sees the host pool at another address"
    return ""


def widest_piece(row_bytes: int, *addresses: int) -> int:
    """Bytes of the widest access (16, 8, 4, 2 or 1) that rows at these addresses allow."""
    piece = 16
    while any(value % piece for value in (row_bytes, *addresses)):
        piece //= 2
    return piece


class ZeroCopyTransfer(CudaTransfer):
    """One kernel gathers rows over PCIe and scatters them into the arena; the CPU touches no row.

    Args:
        pool_rows: see `Transfer`; page-locked (`zero_copy_problem` says whether it can be read).
        arena_rows: see `Transfer`.
        streams: see `CudaTransfer`.
        blocks: thread blocks a transfer occupies, one an SM. More is faster and disturbs the compute
            stream more; may be changed between transfers.
        threads: threads of a block, a multiple of 32.
        in_flight: loads a thread has outstanding.

    Raises:
        InvalidOption: the pool cannot be read by the device, or a number is out of range.
    """

    name = "zero_copy"

    def __init__(
        self,
        pool_rows: torch.Tensor,
        arena_rows: torch.Tensor,
        streams: DeviceStreams | None = None,
        blocks: int = 2,
        threads: int = 512,
        in_flight: int = 8,
    ) -> None:
        problem = zero_copy_problem(pool_rows, arena_rows.device)
        if problem:
            raise InvalidOption(f"transfer='zero_copy' cannot be used: {problem}", "use 'auto' or 'staged'")
        if blocks < 1 or in_flight < 1 or threads % 32 or not 32 <= threads <= 1024:
            raise InvalidOption(
                f"blocks={blocks}, threads={threads}, in_flight={in_flight} is not a launch",
                "use such as blocks=2, threads=512, in_flight=8",
            )
        super().__init__(pool_rows, arena_rows, streams)
        self.blocks = blocks
        self.threads = threads
        piece = widest_piece(self.row_bytes, pool_rows.data_ptr(), arena_rows.data_ptr())
        self._block_bytes = threads * in_flight * piece
        cupy = importlib.import_module("cupy")
        with self.streams.on_copy():
            self._stream = cupy.cuda.ExternalStream(self.streams.copy.cuda_stream, self.streams.device.index)
            module = cupy.RawModule(
                code=gather_source().read_text(),
                options=(
                    f"-DROW_BYTES={self.row_bytes}",
                    f"-DPIECE={piece}",
                    f"-DIN_FLIGHT={in_flight}",
                    f"-DTHREADS={threads}",
                ),
            )
            self._kernel = module.get_function("gather_rows")
            self._ring = Ring(partial(IdSlot, self.streams.device), RING_SLOTS)

    def submit(self, move: RowMove, after: Any = None) -> Ticket:
        self._check_move(move)
        ticket = self._ticket(len(move) * self.row_bytes)
        with self._lock:
            self._check_open()
            self._track(ticket)
            self._start(partial(self._gather, move), after, ticket)
        return ticket

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drain()

    def _gather(self, move: RowMove) -> None:
        for first in range(0, len(move), CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, len(move))
            slot = self._ring.acquire()
            try:
                self._launch(slot, move.src_rows[first:last], move.dst_rows[first:last])
            finally:
                self._ring.release(slot)

    def _launch(self, slot: IdSlot, src_rows: np.ndarray, dst_rows: np.ndarray) -> None:
        n = len(src_rows)
        slot.array[:n] = src_rows
        slot.array[n : 2 * n] = dst_rows
        slot.device[: 2 * n].copy_(slot.host[: 2 * n], non_blocking=True)
        ids = slot.device.data_ptr()
        useful_blocks = -(-n * self.row_bytes // self._block_bytes)
        with self._stream:
            self._kernel(
                (min(self.blocks, useful_blocks),),
                (self.threads,),
                (
                    np.uint64(self.pool_rows.data_ptr()),
                    np.uint64(self.arena_rows.data_ptr()),
                    np.uint64(ids),
                    np.uint64(ids + 8 * n),
                    np.int64(n),
                ),
            )

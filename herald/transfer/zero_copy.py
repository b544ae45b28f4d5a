"""Rows read straight out of page-locked host memory by a kernel on the copy stream."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from herald.config import check
from herald.errors import InvalidOption
from herald.transfer.base import RowMove
from herald.transfer.cuda import CudaTransfer, DeviceTicket
from herald.transfer.gather_kernel import BULK, REGISTERS, CompiledGather, GatherKernel, widest_piece
from herald.transfer.streams import DeviceStreams

# What a transfer uses unless told otherwise; chosen by bench_longctx/transfer/bench_interference.py.
KERNEL = BULK
BLOCKS = 1
LAUNCH_BYTES = 1 << 20
# cudaMemoryTypeHost, in cudaPointerAttributes.
HOST_MEMORY = 1


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


class ZeroCopyTransfer(CudaTransfer):
    """A kernel gathers rows over PCIe and scatters them into the arena; the CPU touches no row.

    A move is launched in pieces. Between two of them the compute stream's kernels can have the SM.

    Args:
        pool_rows: see `Transfer`; page-locked (`zero_copy_problem` says whether it can be read).
        arena_rows: see `Transfer`.
        streams: see `CudaTransfer`.
        blocks: thread blocks a transfer occupies. More are faster, and disturb the compute stream more; may
            be changed between transfers.
        kernel: which kernel gathers, or None for `KERNEL` where the device and the rows allow it, and the
            one that always works elsewhere.
        launch_bytes: rows of one launch, in bytes; at least one row, 0 for one launch a move. May be changed
            between transfers.

    Raises:
        InvalidOption: the pool cannot be read by the device, the kernel cannot be used for such rows,
            ``blocks`` is below 1, or ``launch_bytes`` below 0.
    """

    name = "zero_copy"

    def __init__(
        self,
        pool_rows: torch.Tensor,
        arena_rows: torch.Tensor,
        streams: DeviceStreams | None = None,
        blocks: int = BLOCKS,
        kernel: GatherKernel | None = None,
        launch_bytes: int = LAUNCH_BYTES,
    ) -> None:
        problem = zero_copy_problem(pool_rows, arena_rows.device)
        if problem:
            raise InvalidOption(f"transfer='zero_copy' cannot be used: {problem}", "use 'auto' or 'staged'")
        check(blocks >= 1, "blocks", blocks, "use 1 or more")
        check(launch_bytes >= 0, "launch_bytes", launch_bytes, "use 0 or more")
        super().__init__(pool_rows, arena_rows, streams)
        self.blocks = blocks
        self.launch_bytes = launch_bytes
        piece = widest_piece(self.row_bytes, pool_rows.data_ptr(), arena_rows.data_ptr())
        self.kernel = self._usable(kernel, piece)
        with torch.cuda.device(self.streams.device):
            self._gather = CompiledGather(self.kernel, self.row_bytes, piece)

    def _usable(self, kernel: GatherKernel | None, piece: int) -> GatherKernel:
        capability = torch.cuda.get_device_capability(self.streams.device)
        problem = (kernel or KERNEL).problem(capability, self.row_bytes, piece)
        if kernel is None:
            return REGISTERS if problem else KERNEL
        if problem:
            raise InvalidOption(f"kernel={kernel} cannot be used: {problem}", "leave kernel out")
        return kernel

    def _bring(self, move: RowMove, after: Any, ticket: DeviceTicket) -> None:
        ids = self._send_ids(move, ticket, [move.src_rows, move.dst_rows])
        if len(move):
            self._gather.launch(
                self.streams.copy.cuda_stream,
                self.blocks,
                self.pool_rows.data_ptr(),
                self.arena_rows.data_ptr(),
                ids[0].data_ptr(),
                ids[1].data_ptr(),
                len(move),
                max(1, self.launch_bytes // self.row_bytes) if self.launch_bytes else 0,
            )

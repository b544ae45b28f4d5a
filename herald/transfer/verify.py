"""Checksum mode: what arrived is compared with what was sent."""

from __future__ import annotations

import torch

from herald.errors import TransferCorrupted
from herald.transfer.base import RowMove

# Rows compared at a time, so that the copies stay small beside the pool.
CHUNK_ROWS = 65_536


def verify_rows(move: RowMove, pool_rows: torch.Tensor, arena_rows: torch.Tensor) -> None:
    """Compare the bytes of every moved row in the arena with its source in the pool.

    The transfer must be complete for the host and for the current stream. Slow: it copies every row
    once more and waits for the device.

    Args:
        move: the rows.
        pool_rows: [pool rows, 2 * head_dim] on the host.
        arena_rows: [arena rows, 2 * head_dim] on the device.

    Raises:
        TransferCorrupted: names the first row that differs.
    """
    for first in range(0, len(move), CHUNK_ROWS):
        src = torch.from_numpy(move.src_rows[first : first + CHUNK_ROWS])
        dst = torch.from_numpy(move.dst_rows[first : first + CHUNK_ROWS])
        sent = pool_rows.index_select(0, src).to(arena_rows.device).view(torch.uint8)
        arrived = arena_rows.index_select(0, dst.to(arena_rows.device)).view(torch.uint8)
        differs = (sent != arrived).any(dim=1).nonzero()
        if len(differs):
            at = int(differs[0])
            raise TransferCorrupted(
                f"entry {first + at} of {len(move)}: pool row {int(src[at])} is not what stands in "
                f"arena row {int(dst[at])}",
                "report this with the transfer mode; transfer='staged' takes another way",
            )

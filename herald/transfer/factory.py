"""Which way rows travel on a given device."""

from __future__ import annotations

import torch

from herald.config import TransferMode
from herald.errors import InvalidOption
from herald.transfer.base import Transfer
from herald.transfer.staged import StagedTransfer
from herald.transfer.streams import DeviceStreams
from herald.transfer.threads import ThreadTransfer
from herald.transfer.zero_copy import ZeroCopyTransfer, zero_copy_problem


def make_transfer(
    mode: TransferMode,
    pool_rows: torch.Tensor,
    arena_rows: torch.Tensor,
    device: torch.device | str,
    num_threads: int,
    streams: DeviceStreams | None = None,
) -> tuple[Transfer, str]:
    """Make the transfer of a mode, or the best that works.

    Args:
        mode: ``"zero_copy"``, ``"staged"``, or ``"auto"``: on a CUDA device the first of these two that
            works, on the CPU a thread.
        pool_rows: [pool rows, 2 * head_dim], contiguous, on the host.
        arena_rows: [arena rows, 2 * head_dim], contiguous, on ``device``.
        device: where the arena is.
        num_threads: threads that pack rows in staged mode.
        streams: streams of ``device`` to use, or None to make them.

    Returns:
        The transfer, and why ``"auto"`` could not take zero_copy: "" when it did, or on the CPU.

    Raises:
        InvalidOption: the mode is unknown, or cannot be used here.
    """
    device = torch.device(device)
    if mode not in ("auto", "zero_copy", "staged"):
        raise InvalidOption(f"transfer={mode!r} is not valid", "use 'auto', 'zero_copy' or 'staged'")
    if device.type != "cuda":
        if mode != "auto":
            raise InvalidOption(f"transfer={mode!r} needs a CUDA device, not {device}", "use 'auto'")
        return ThreadTransfer(pool_rows, arena_rows), ""
    why = ""
    if mode == "zero_copy":
        return ZeroCopyTransfer(pool_rows, arena_rows, streams), ""
    if mode == "auto":
        why = zero_copy_problem(pool_rows, arena_rows.device)
        if not why:
            try:
                return ZeroCopyTransfer(pool_rows, arena_rows, streams), ""
            except Exception as error:  # whatever a compiler or driver says, the other way may work
                why = f"zero_copy failed to start ({error})"
    return StagedTransfer(pool_rows, arena_rows, streams, num_threads), why

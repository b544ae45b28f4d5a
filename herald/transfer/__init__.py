"""Rows on their way between host and device.

`RowMove` says which rows, a `Transfer` moves them and answers with a `Ticket`. `make_transfer` picks the
way: a kernel that reads host memory (`ZeroCopyTransfer`), packing and the copy engine
(`StagedTransfer`), or a thread (`ThreadTransfer`, the CPU device). Knows nothing of models.
"""

from herald.transfer.base import RowMove, Ticket, Transfer
from herald.transfer.factory import make_transfer
from herald.transfer.gather_kernel import GatherKernel
from herald.transfer.staged import StagedTransfer
from herald.transfer.streams import DeviceStreams, HostEvent
from herald.transfer.threads import ThreadTransfer
from herald.transfer.verify import verify_rows
from herald.transfer.zero_copy import ZeroCopyTransfer

__all__ = [
    "DeviceStreams",
    "GatherKernel",
    "HostEvent",
    "RowMove",
    "StagedTransfer",
    "ThreadTransfer",
    "Ticket",
    "Transfer",
    "ZeroCopyTransfer",
    "make_transfer",
    "verify_rows",
]

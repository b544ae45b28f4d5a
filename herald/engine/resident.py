"""One request's resident set: which positions its slots hold, and how a new selection gets there.

The set has T(n) rows for a prefix of n positions (`OffloadConfig.resident_rows`). T grows by at most
one a position, so when block i ends, the slots that leave plus the slots that are new are exactly the
arriving rows plus the B rows of block i itself. Arrivals take the first of them before the fused
forward; block i's own rows take the rest after it. Until then those slots keep their old rows, which
are true rows of the same prefix: attending to them does no harm, and no slot is ever half written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from herald.config import OffloadConfig
from herald.engine.arena import DeviceArena
from herald.select import Plan, SlotGeometry
from herald.transfer import Ticket
from herald.transfer.streams import record_event
from herald_kernels import copy_rows


@dataclass(frozen=True)
class SetUpdate:
    """A new selection as a difference against the set it was computed from.

    Attributes:
        version: of the resident set it was computed against.
        plan: which rows arrive, where, and which slots take the finished block's own rows.
        ticket: of the transfer that fills the staging rows; None when nothing arrives.
    """

    version: int
    plan: Plan
    ticket: Ticket | None


@dataclass(frozen=True)
class Arrived:
    """Rows of an update that wait in the staging rows of their set.

    Attributes:
        resident: the set.
        staging, slots: int64 [n] flat arena rows, on the device: where they are and where they belong.
    """

    resident: ResidentSet
    staging: torch.Tensor
    slots: torch.Tensor


def put_rows(arrived: Sequence[Arrived]) -> None:
    """Copy rows into their slots, those of all sets at once. The one place where staged rows are read.

    Args:
        arrived: of different sets of one arena.
    """
    if not arrived:
        return
    staging, slots = arrived[0].staging, arrived[0].slots
    if len(arrived) > 1:
        staging, slots = (
            torch.cat([getattr(each, name) for each in arrived]) for name in ("staging", "slots")
        )
    arena = arrived[0].resident.arena
    copy_rows(arena.flat_rows, slots, arena.flat_rows, staging)
    if arena.poison:
        for resident in (each.resident for each in arrived):
            begin = resident.row_start + resident.num_slots
            arena.rows[:, :, begin : begin + resident.num_staging].fill_(float("nan"))


def set_size(config: OffloadConfig, block_length: int, prefix: int) -> int:
    """T(prefix): rows a KV head keeps resident, sinks and the recent window counted in."""
    if not config.enabled:
        return prefix
    return min(
        prefix, max(config.resident_rows(prefix), config.sink_rows + window_rows(config, block_length))
    )


def window_rows(config: OffloadConfig, block_length: int) -> int:
    """Last positions of a prefix that never leave; at least one block."""
    return max(config.recent_rows, block_length)


@lru_cache(maxsize=4096)
def staging_rows(config: OffloadConfig, block_length: int, first_prefix: int, last_prefix: int) -> int:
    """Most rows that can arrive at once: at a block boundary, or within a block when a selection is late.

    Args:
        first_prefix, last_prefix: positions before the first and the last block it decodes.
    """
    most = 0
    for prefix in range(first_prefix, last_prefix, block_length):
        wanted = set_size(config, block_length, prefix + block_length) - block_length
        absent = prefix - set_size(config, block_length, prefix) if config.difference_only else prefix
        most = max(most, min(wanted, absent))
    if config.on_late == "proceed" or config.refreshes:
        first = first_prefix if config.refreshes else first_prefix + block_length
        for late in range(first, last_prefix + 1, block_length):
            size = set_size(config, block_length, late)
            most = max(most, min(size, late - size) if config.difference_only else size)
    return most


class ResidentSet:
    """Slots and staging of one request in the arena.

    Args:
        arena: the device arena.
        config: sizes of the set; with ``enabled=False`` the set is the whole prefix.
        block_length: B.
        first_prefix, last_prefix: positions before the first and the last block it decodes.
        lead: rows of the arena right before the slots that are the request's too.

    Attributes:
        windows, window: rows of the layers with a window, and how many of them the request has.
        window_start: first of the request's rows in ``windows``.
    """

    def __init__(
        self,
        arena: DeviceArena,
        config: OffloadConfig,
        block_length: int,
        first_prefix: int,
        last_prefix: int,
        lead: int = 0,
    ) -> None:
        self.arena = arena
        self.config = config
        self.block_length = block_length
        self.num_slots, self.num_staging = self.required_rows(config, block_length, first_prefix, last_prefix)
        self.lead = lead
        start = arena.allocate(lead + self.num_slots + self.num_staging)
        if start is None:
            raise MemoryError("the arena has no free range of that size")
        self.row_start = start + lead
        self.windows: DeviceArena | None = None
        self.window = self.window_start = 0
        self.length = 0
        self.version = 0
        self.prefix = 0
        self._shape = arena.rows.shape[:2]
        self._lock = threading.Lock()
        self._positions = np.full((*self._shape, self.num_slots if config.enabled else 0), -1, dtype=np.int32)
        self._first_set: list[torch.Tensor] = []
        self._first_copy: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._released = False

    def take_window(self, windows: DeviceArena | None, window: int) -> None:
        """Take ``window`` rows of the layers with a window, if there are such layers.

        Raises:
            MemoryError: there is no free range now; the set has given everything back.
        """
        if windows is None:
            return
        start = windows.allocate(window)
        if start is None:
            self.release()
            raise MemoryError("the rows of layers with a window have no free range of that size")
        self.windows, self.window, self.window_start = windows, window, start

    @staticmethod
    def required_rows(
        config: OffloadConfig, block_length: int, first_prefix: int, last_prefix: int
    ) -> tuple[int, int]:
        """(slots, staging rows) a request needs."""
        slots = set_size(config, block_length, last_prefix)
        if not config.enabled:
            return slots, 0
        return slots, staging_rows(config, block_length, first_prefix, last_prefix)

    @property
    def num_bytes(self) -> int:
        ring = 0 if self.windows is None else self.window * self.windows.bytes_per_slot
        return (self.lead + self.num_slots + self.num_staging) * self.arena.bytes_per_slot + ring

    @property
    def num_rows(self) -> int:
        """Resident rows over all layers and KV heads."""
        return self.length * self._shape[0] * self._shape[1]

    @property
    def geometry(self) -> SlotGeometry:
        """Where the set lies in the arena."""
        return SlotGeometry(self.arena.capacity, self.row_start, self.num_slots, self.num_staging)

    def snapshot(self) -> tuple[int, int, np.ndarray]:
        """(version, length, positions): the set as a plan is made against it. Thread-safe.

        ``positions`` int32 [layers, kv_heads, S]: position of the row in each slot; -1, or anything at or
        above ``length``, for none. It is replaced, not changed, except at slots above ``length``.
        """
        with self._lock:
            self._read_first_set()
            return self.version, self.length, self._positions

    def size_for(self, prefix: int) -> int:
        """T(prefix), the rows a KV head keeps resident."""
        return set_size(self.config, self.block_length, prefix)

    def needs_selection(self, prefix: int) -> bool:
        """Whether the set for ``prefix`` positions has to be chosen at all."""
        if not self.config.enabled or prefix <= self.block_length:
            return False
        return self.size_for(prefix) < prefix or not self.config.difference_only

    def candidates(self, prefix: int) -> tuple[int, int, int]:
        """(first, last, k): choose k positions of [first, last) for a prefix of that many positions."""
        last = max(prefix - window_rows(self.config, self.block_length), 0)
        first = min(self.config.sink_rows, last)
        return first, last, min(self.size_for(prefix) - (prefix - last) - first, last - first)

    def fill(self, layer: int, rows: torch.Tensor, positions: torch.Tensor, prefix: int) -> None:
        """Write one layer's first set, straight from that layer's KV on the device.

        Args:
            rows: [kv_heads, n, 2 * head_dim], the layer's KV.
            positions: int64 [kv_heads, T(prefix)], ascending, on the same device.
        """
        slots = self.arena.rows[layer, :, self.row_start : self.row_start + positions.shape[1]]
        index = positions.unsqueeze(2).expand(-1, -1, rows.shape[2])
        slots.copy_(torch.gather(rows, 1, index))
        self._first_set.append(positions.to(torch.int32))
        if len(self._first_set) == self._shape[0]:
            self.adopt(torch.stack(self._first_set), prefix)
            self._first_set.clear()

    def adopt(self, positions: torch.Tensor, prefix: int) -> None:
        """Take the rows that the first slots hold as the set for ``prefix`` positions.

        Args:
            positions: int32 [layers, kv_heads, T(prefix)] on any device, ascending. They reach the host when
                somebody asks for them.
        """
        self.length = positions.shape[2]
        self.prefix = prefix
        event = None
        if positions.is_cuda:
            host = torch.empty(positions.shape, dtype=positions.dtype, pin_memory=True)
            host.copy_(positions, non_blocking=True)
            event = record_event(positions.device)
            positions = host
        self._first_copy = positions, event

    def layer_view(self, layer: int) -> torch.Tensor:
        """The layer's slots ``[kv_heads, S, 2 * head_dim]`` (dense prefill writes its KV here)."""
        return self.arena.rows[layer, :, self.row_start : self.row_start + self.num_slots]

    def fill_window(self, place: int, rows: torch.Tensor, prefix: int) -> None:
        """Write the last rows of a layer with a window: row r of a ring holds the last position that leaves
        the rest r when divided by its length.

        Args:
            place: of the layer, see `AttentionShape`.
            rows: [kv_heads, n, 2 * head_dim] of the last n positions before ``prefix``, n at most the window.
        """
        assert self.windows is not None
        slots = torch.arange(prefix - rows.shape[1], prefix, device=rows.device) % self.window
        self.windows.rows[place, :, self.window_start + slots] = rows

    def mark_dense(self, prefix: int) -> None:
        """The first ``prefix`` slots hold positions 0, 1, ... in order, in every layer and head."""
        self.length = self.prefix = prefix

    def accept(self, update: SetUpdate, check: Callable[[], None] | None = None) -> Arrived | None:
        """Make an update's positions the set's. Its rows must be put into their slots, by `put_rows`, before
        anything attends to the set or anything else is brought for it.

        Later work on the compute stream waits for the transfer's event.

        Args:
            update: made against this version of the set.
            check: compares the staged rows with what was sent.

        Returns:
            The rows, None where nothing arrived.
        """
        with self._lock:
            if update.version != self.version:
                raise ValueError(f"update of version {update.version} against version {self.version}")
            arrived = None
            if update.ticket is not None:
                update.ticket.wait_device()
                if check is not None:
                    check()
                arrived = Arrived(self, *update.ticket.device_rows())
            self._positions = update.plan.positions
            self.version += 1
        return arrived

    def next_rows(self) -> np.ndarray:
        """Flat arena rows, int64 [layers * kv_heads * B], of the B slots that follow the set."""
        slots = np.arange(self.length, self.length + self.block_length, dtype=np.int64)
        return self._flat_rows(slots)

    def append_block(self, prefix: int, follows: bool) -> None:
        """A finished block's final KV was written, on the device, into the slots kept for it.

        Args:
            prefix: positions before and in the block.
            follows: the set is the whole prefix, and the slots are those of `next_rows`; else a plan or
                `slide_window` has entered the block's positions.
        """
        with self._lock:
            if follows and self.config.enabled:
                self._read_first_set()
                block = np.arange(prefix - self.block_length, prefix, dtype=np.int32)
                self._positions[:, :, self.length : self.length + self.block_length] = block
            self.length = self.size_for(prefix)
            self.prefix = prefix
            self.version += 1

    def slide_window(self, prefix: int) -> np.ndarray:
        """Flat arena rows for block [prefix - B, prefix) when no selection says which rows leave.

        The rows that just fell out of the recent window leave (the highest positions below it): what was
        selected before stays. The block's positions are entered at once.

        Returns:
            int64 [layers * kv_heads * B].
        """
        with self._lock:
            self._read_first_set()
            slots = self._leaving_slots(prefix)
            block = np.arange(prefix - self.block_length, prefix, dtype=np.int32)
            positions = self._positions.copy()
            np.put_along_axis(positions, slots, np.broadcast_to(block, slots.shape), axis=2)
            self._positions = positions
            return self._flat_rows(slots)

    def _flat_rows(self, slots: np.ndarray) -> np.ndarray:
        """Flat arena rows of ``slots`` [layers, kv_heads, n], or [n] for all of them."""
        heads = np.arange(self._shape[0] * self._shape[1], dtype=np.int64)
        base = heads.reshape(*self._shape, 1) * self.arena.capacity + self.row_start
        return (base + slots).reshape(-1)

    def _leaving_slots(self, prefix: int) -> np.ndarray:
        grown = self.size_for(prefix) - self.length
        fresh = np.arange(self.length, self.length + grown, dtype=np.int32)
        fresh = np.broadcast_to(fresh, (*self._shape, grown))
        leave = self.block_length - grown
        if leave == 0:
            return fresh
        held = self._positions[:, :, : self.length]
        first, last, _ = self.candidates(prefix)
        rank = np.where((held >= first) & (held < last), held, -1)
        leaving = np.argsort(-rank, axis=2, kind="stable")[:, :, :leave].astype(np.int32)
        return np.concatenate([leaving, fresh], axis=2)

    def release(self) -> None:
        """Give the rows back. Idempotent."""
        if not self._released:
            self._released = True
            self.arena.release(self.row_start - self.lead, self.lead + self.num_slots + self.num_staging)
            if self.windows is not None:
                self.windows.release(self.window_start, self.window)

    def _read_first_set(self) -> None:
        if self._first_copy is None:
            return
        positions, event = self._first_copy
        if event is not None:
            event.synchronize()
        self._positions[:, :, : positions.shape[2]] = positions.numpy()
        self._first_copy = None

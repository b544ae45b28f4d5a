"""One request's resident set: which positions its slots hold, and how a new selection gets there.

The set has T(n) rows for a prefix of n positions (`OffloadConfig.resident_rows`). T grows by at most
one a position, so when block i ends, the slots that leave plus the slots that are new are exactly the
arriving rows plus the B rows of block i itself. Arrivals take the first of them before the fused
forward; block i's own rows take the rest after it. Until then those slots keep their old rows, which
are true rows of the same prefix: attending to them does no harm, and no slot is ever half written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from herald.config import OffloadConfig
from herald.engine.arena import DeviceArena
from herald.errors import ResidentSetTooSmall
from herald.transfer import Ticket
from herald_kernels import copy_rows


@dataclass(frozen=True)
class SetUpdate:
    """A new selection as a difference against the set it was computed from.

    Attributes:
        version: of the resident set it was computed against.
        prefix: positions the set will stand for once the block's own rows are written.
        positions: int32 [layers, kv_heads, a_max], arriving positions, -1 padded.
        slots: int32 [layers, kv_heads, a_max], where they go.
        counts: int32 [layers, kv_heads].
        free_slots: int32 [layers, kv_heads, B or 0], for the finished block's own rows.
        ticket: of the transfer that fills the staging rows; None when nothing arrives.
        moved: rows that travel.
    """

    version: int
    prefix: int
    positions: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    free_slots: np.ndarray
    ticket: Ticket | None
    moved: int


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
    if config.on_late == "proceed":
        for late in range(first_prefix + block_length, last_prefix + 1, block_length):
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
    """

    def __init__(
        self,
        arena: DeviceArena,
        config: OffloadConfig,
        block_length: int,
        first_prefix: int,
        last_prefix: int,
    ) -> None:
        self.arena = arena
        self.config = config
        self.block_length = block_length
        self.num_slots, self.num_staging = self.required_rows(config, block_length, first_prefix, last_prefix)
        start = arena.allocate(self.num_slots + self.num_staging)
        if start is None:
            raise MemoryError("the arena has no free range of that size")
        self.row_start = start
        self.length = 0
        self.version = 0
        self.prefix = 0
        self.lock = threading.Lock()
        num_layers, num_kv_heads = arena.rows.shape[:2]
        self.slot_positions = np.full((num_layers, num_kv_heads, self.num_slots), -1, dtype=np.int32)
        base = np.arange(num_layers * num_kv_heads, dtype=np.int64) * arena.capacity + start
        self._base = base.reshape(num_layers, num_kv_heads, 1)  # arena row of slot 0, per layer and head
        self._released = False

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
        return (self.num_slots + self.num_staging) * self.arena.bytes_per_slot

    @property
    def num_rows(self) -> int:
        """Resident rows over all layers and KV heads."""
        return self.length * self.slot_positions.shape[0] * self.slot_positions.shape[1]

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

    def target(self, prefix: int, selected: np.ndarray, upto: int) -> np.ndarray:
        """Positions of the whole set below ``upto``: sinks, selection, window. int32, ascending.

        Args:
            prefix: positions the selection was made for.
            selected: int32 [layers, kv_heads, k], ascending.
            upto: first position that is not to be part of the result.
        """
        first, last, _ = self.candidates(prefix)
        shape = selected.shape[:2]
        sinks = np.broadcast_to(np.arange(first, dtype=np.int32), (*shape, first))
        recent = np.arange(last, upto, dtype=np.int32)
        return np.concatenate([sinks, selected, np.broadcast_to(recent, (*shape, recent.size))], axis=2)

    def fill(self, layer: int, rows: torch.Tensor, positions: torch.Tensor, prefix: int) -> None:
        """Write one layer's first set, straight from that layer's KV on the device.

        Args:
            rows: [kv_heads, n, 2 * head_dim], the layer's KV.
            positions: int64 [kv_heads, T(prefix)], ascending, on the same device.
        """
        count = positions.shape[1]
        slots = self.arena.rows[layer, :, self.row_start : self.row_start + count]
        index = positions.unsqueeze(2).expand(-1, -1, rows.shape[2])
        slots.copy_(torch.gather(rows, 1, index))
        self.slot_positions[layer, :, :count] = positions.cpu().numpy()
        self.length = count
        self.prefix = prefix

    def layer_view(self, layer: int) -> torch.Tensor:
        """The layer's slots ``[kv_heads, S, 2 * head_dim]`` (dense prefill writes its KV here)."""
        return self.arena.rows[layer, :, self.row_start : self.row_start + self.num_slots]

    def mark_dense(self, prefix: int) -> None:
        """The first ``prefix`` slots hold positions 0, 1, ... in order, in every layer and head."""
        self.slot_positions[:, :, :prefix] = np.arange(prefix, dtype=np.int32)
        self.length = self.prefix = prefix

    def staging_ids(self, counts: np.ndarray) -> np.ndarray:
        """Flat arena rows of the staging area in (layer, head, order) order: int64 [sum(counts)]."""
        most = int(counts.max(initial=0))
        if most > self.num_staging:
            raise ResidentSetTooSmall(
                f"{most} rows arrive for {self.num_staging} staging rows", "report this: the bound is wrong"
            )
        order = np.arange(most, dtype=np.int64)
        ids = self._base + self.num_slots + order
        return ids[order < counts[:, :, None]]

    def slot_ids(self, slots: np.ndarray) -> np.ndarray:
        """Flat arena rows of ``slots`` (int32 [layers, kv_heads, m], -1 padding left out)."""
        return (self._base + slots)[slots >= 0]

    def apply(self, update: SetUpdate, check: Callable[[], None] | None = None) -> None:
        """Put arrived rows into their slots. The one place where a staged row is read.

        Later work on the compute stream waits for the transfer's event before it copies.

        Args:
            update: made against this version of the set.
            check: compares the staged rows with what was sent, before they are copied.
        """
        with self.lock:
            if update.version != self.version:
                raise ValueError(f"update of version {update.version} against version {self.version}")
            if update.ticket is not None:
                update.ticket.wait_device()
                if check is not None:
                    check()
                source = self.staging_ids(update.counts)
                self._copy(self.slot_ids(update.slots), self.arena.flat_rows, source)
                layers, heads, order = np.nonzero(update.slots >= 0)
                slots = update.slots[layers, heads, order]
                self.slot_positions[layers, heads, slots] = update.positions[layers, heads, order]
                if self.arena.poison:
                    begin = self.row_start + self.num_slots
                    self.arena.rows[:, :, begin : begin + self.num_staging].fill_(float("nan"))
            self.version += 1

    def append_block(self, rows: torch.Tensor, free_slots: np.ndarray, prefix: int) -> None:
        """Write a finished block's final KV into the slots kept for it.

        Args:
            rows: [layers, kv_heads, B, 2 * head_dim] on the device.
            free_slots: int32 [layers, kv_heads, B].
            prefix: positions before and in the block.
        """
        with self.lock:
            source = rows.reshape(-1, rows.shape[-1])
            self._copy(self.slot_ids(free_slots), source, np.arange(source.shape[0], dtype=np.int64))
            block = np.arange(prefix - self.block_length, prefix, dtype=np.int32)
            np.put_along_axis(
                self.slot_positions, free_slots, np.broadcast_to(block, free_slots.shape), axis=2
            )
            self.length = self.size_for(prefix)
            self.prefix = prefix
            self.version += 1

    def slots_without_selection(self, prefix: int) -> np.ndarray:
        """Slots for block [prefix - B, prefix) when no selection says which rows leave.

        The rows that just fell out of the recent window leave (the highest positions below it): the
        window slides and what was selected before stays. A set that still is the whole prefix only
        grows.

        Returns:
            int32 [layers, kv_heads, B].
        """
        grown = self.size_for(prefix) - self.length
        shape = self.slot_positions.shape[:2]
        fresh = np.arange(self.length, self.length + grown, dtype=np.int32)
        fresh = np.broadcast_to(fresh, (*shape, grown))
        leave = self.block_length - grown
        if leave == 0:
            return fresh
        held = self.slot_positions[:, :, : self.length]
        first, last, _ = self.candidates(prefix)
        rank = np.where((held >= first) & (held < last), held, -1)
        leaving = np.argsort(-rank, axis=2, kind="stable")[:, :, :leave].astype(np.int32)
        return np.concatenate([leaving, fresh], axis=2)

    def release(self) -> None:
        """Give the rows back. Idempotent."""
        if not self._released:
            self._released = True
            self.arena.release(self.row_start, self.num_slots + self.num_staging)

    def _copy(self, dst_rows: np.ndarray, src: torch.Tensor, src_rows: np.ndarray) -> None:
        device = self.arena.rows.device
        to = torch.from_numpy(dst_rows).to(device)
        copy_rows(self.arena.flat_rows, to, src, torch.from_numpy(src_rows).to(device))

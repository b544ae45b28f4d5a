"""The device arena: every request's resident set and staging rows, in one tensor.

A row is ``[K | V]`` of one token in one KV head of one layer, the same bytes as in the host pool, so
that a transfer is "row i of one two-dimensional array to row j of another". A request owns one range
of row indices, the same in every layer and KV head: S slots that attention reads, then G staging rows
that arriving rows land in.
"""

from __future__ import annotations

import math
import threading

import torch

from herald.errors import ResidentSetTooSmall


class DeviceArena:
    """Rows on the device with a first-fit allocator of row ranges (thread-safe).

    Args:
        num_layers, num_kv_heads, head_dim: shape of the model's KV.
        capacity: rows A per layer and KV head.
        dtype, device: of the rows.
        poison: fill rows with NaN whenever nobody owns them (tests), so that a read of a row that was
            never written reaches a logit and is seen.

    Raises:
        ResidentSetTooSmall: the device has no room for the arena.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self.capacity = capacity
        self.poison = poison
        shape = (num_layers, num_kv_heads, capacity, 2 * head_dim)
        needed = math.prod(shape) * dtype.itemsize
        try:
            self.rows = torch.empty(shape, dtype=dtype, device=device)  # [layers, kv_heads, A, K | V]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ResidentSetTooSmall(
                f"no room for {needed:,} bytes of resident KV on {device}",
                "lower kv_budget, max_model_len or max_num_seqs, or free device memory",
            ) from error
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (start, rows), ascending, never adjacent
        self._lock = threading.Lock()
        if poison:
            self.rows.fill_(float("nan"))

    @property
    def flat_rows(self) -> torch.Tensor:
        """All rows as ``[layers * kv_heads * A, 2 * head_dim]``."""
        return self.rows.view(-1, self.rows.shape[-1])

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    @property
    def bytes_per_slot(self) -> int:
        """Bytes one row index takes over all layers and KV heads."""
        return self.num_bytes // max(self.capacity, 1)

    @property
    def idle(self) -> bool:
        """True when no request owns a row."""
        return self.rows_free == self.capacity

    @property
    def rows_free(self) -> int:
        return sum(rows for _, rows in self._free)

    def allocate(self, rows: int) -> int | None:
        """First row of a free range of ``rows`` rows, or None when there is none now."""
        with self._lock:
            for at, (start, size) in enumerate(self._free):
                if size >= rows:
                    rest = [(start + rows, size - rows)] if size > rows else []
                    self._free[at : at + 1] = rest
                    return start
        return None

    def release(self, start: int, rows: int) -> None:
        """Give a range back; neighbours in the free list are merged."""
        if self.poison:
            self.rows[:, :, start : start + rows].fill_(float("nan"))
        with self._lock:
            self._free = _merged([*self._free, (start, rows)])


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, size in sorted(ranges):
        if merged and merged[-1][0] + merged[-1][1] > begin:
            raise ValueError(f"rows {begin} to {begin + size} were released twice")
        if merged and merged[-1][0] + merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        elif size:
            merged.append((begin, size))
    return merged

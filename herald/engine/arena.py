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
        capacity: rows A per layer and KV head; `resize` changes it.
        dtype, device: of the rows.
        poison: fill rows with NaN whenever nobody owns them (tests), so that a read of a row that was
            never written reaches a logit and is seen.

    Attributes:
        rows: [layers, kv_heads, A, 2 * head_dim].
        flat_rows: the same as [layers * kv_heads * A, 2 * head_dim].
        replaced: how often `resize` put other rows in their place, also ones of the same shape.
        unit: rows of the largest range that there shall be room for: smaller ones never cross a multiple of
            it, so that as many as there are units find a place, whatever came and went before. 0 for ranges
            that lie anywhere.

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
        self.poison = poison
        self.replaced = 0
        self.unit = 0
        self._lock = threading.Lock()
        self._make_rows((num_layers, num_kv_heads, 0, 2 * head_dim), dtype, device)
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Replace the rows by ``capacity`` new ones, while no request owns any.

        Nobody else may hold `rows` or `flat_rows` any more, or old and new rows share the device.

        Raises:
            ResidentSetTooSmall: no room; the arena is left with no rows.
        """
        if not self.idle:
            raise ValueError("the arena cannot change its size while a request owns rows")
        self.replaced += 1
        (layers, heads, _, width), dtype, device = self.rows.shape, self.rows.dtype, self.rows.device
        self._make_rows((layers, heads, 0, width), dtype, device)  # frees the old rows first
        shape = (layers, heads, capacity, width)
        try:
            self._make_rows(shape, dtype, device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ResidentSetTooSmall(
                f"no room for {math.prod(shape) * dtype.itemsize:,} bytes of resident KV on {device}",
                "lower kv_budget, max_model_len or max_num_seqs, or free device memory",
            ) from error

    def _make_rows(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(shape, dtype=dtype, device=device)
        self.flat_rows = self.rows.view(-1, shape[3])
        if self.poison:
            self.rows.fill_(float("nan"))
        # (start, rows), ascending, never adjacent, never empty
        self._free: list[tuple[int, int]] = _merged([(0, shape[2])])

    @property
    def capacity(self) -> int:
        """Rows per layer and KV head."""
        return self.rows.shape[2]

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
        if rows == 0:  # prompt and output within one block: nothing is ever resident
            return 0
        with self._lock:
            for at, (start, size) in enumerate(self._free):
                begin = self._begin(start, rows)
                if begin + rows <= start + size:
                    pieces = ((start, begin - start), (begin + rows, start + size - begin - rows))
                    self._free[at : at + 1] = [piece for piece in pieces if piece[1]]
                    return begin
        return None

    def _begin(self, start: int, rows: int) -> int:
        """Where a range that may begin at ``start`` does begin."""
        if rows > self.unit or start // self.unit == (start + rows - 1) // self.unit:
            return start
        return -(-start // self.unit) * self.unit

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

"""What a new selection changes: which rows arrive, into which slots, and which slots come free."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from herald.errors import ResidentSetTooSmall, UsageError
from herald.jit import jit


class Difference(NamedTuple):
    """Changes to a request's slots, per layer and KV head.

    Attributes:
        arrival_positions: int32 [L, H, a_max], target positions that are not resident, ascending; then -1.
        arrival_slots: int32 [L, H, a_max], the slot each of them goes to; then -1.
        arrival_count: int32 [L, H], arrivals; a_max is the largest.
        free_slots: int32 [L, H, num_free], ascending, slots that hold neither kept rows nor arrivals.
    """

    arrival_positions: np.ndarray
    arrival_slots: np.ndarray
    arrival_count: np.ndarray
    free_slots: np.ndarray


def difference(slot_positions: np.ndarray, length: int, target: np.ndarray, num_free: int) -> Difference:
    """The change that makes ``target`` resident and leaves ``num_free`` slots for a block's own rows.

    Slots whose position is in the target keep their row. The others, ascending, and after them slots
    ``length``, ``length + 1`` ... are handed out: first to the arrivals, then as free slots. Afterwards slots
    ``[0, m + num_free)`` hold the target and the block's rows, without a hole.

    Args:
        slot_positions: int32 [L, H, S], position of the row in each slot; only ``[0, length)`` is read. A
            position that occurs twice is kept once, a negative one counts as an empty slot.
        target: int32 [L, H, m], ascending and distinct.

    Raises:
        ResidentSetTooSmall: ``m + num_free`` exceeds the S slots.
        UsageError: shapes do not fit; or ``m + num_free < length``, which would leave holes.
    """
    num_slots, wanted = slot_positions.shape[2], target.shape[2]
    if slot_positions.shape[:2] != target.shape[:2]:
        raise UsageError(
            f"target of shape {target.shape} does not fit", f"use {(*slot_positions.shape[:2], wanted)}"
        )
    if not 0 <= length <= num_slots:
        raise UsageError(f"length={length} exceeds the slots", f"use 0 to {num_slots}")
    if num_free < 0:
        raise UsageError(f"num_free={num_free} is negative", "use 0 or more")
    if wanted + num_free > num_slots:
        raise ResidentSetTooSmall(
            f"{wanted} selected and {num_free} free rows do not fit {num_slots} slots",
            f"select at most {max(0, num_slots - num_free)} rows",
        )
    if wanted + num_free < length:
        raise UsageError(
            f"{wanted} selected and {num_free} free rows leave holes in {length} slots",
            f"select at least {length - num_free} rows",
        )
    positions = np.full(target.shape, -1, dtype=np.int32)
    slots = np.full(target.shape, -1, dtype=np.int32)
    counts = np.zeros(target.shape[:2], dtype=np.int32)
    free = np.empty((*target.shape[:2], num_free), dtype=np.int32)
    if target.size and target.min() < 0:
        raise UsageError("target holds a negative position", "use positions from 0")
    marks = np.zeros(int(target.max()) + 1 if target.size else 0, dtype=np.uint8)
    _fill(
        np.ascontiguousarray(slot_positions, dtype=np.int32),
        length,
        np.ascontiguousarray(target, dtype=np.int32),
        marks,
        positions,
        slots,
        counts,
        free,
    )
    most = int(counts.max()) if counts.size else 0
    return Difference(
        np.ascontiguousarray(positions[..., :most]), np.ascontiguousarray(slots[..., :most]), counts, free
    )


_WANTED, _RESIDENT = 1, 2


@jit
def _fill(
    slot_positions: np.ndarray,
    length: int,
    target: np.ndarray,
    marks: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    counts: np.ndarray,
    free: np.ndarray,
) -> None:
    """Every (layer, head) in turn. ``marks`` [largest target + 1] is zero between them."""
    candidates = np.empty(length, dtype=np.int32)
    for layer in range(target.shape[0]):
        for head in range(target.shape[1]):
            wanted = target[layer, head]
            for position in wanted:
                marks[position] = _WANTED
            leaving = 0
            for slot in range(length):
                position = slot_positions[layer, head, slot]
                if 0 <= position < marks.size and marks[position] == _WANTED:
                    marks[position] = _RESIDENT
                else:
                    candidates[leaving] = slot
                    leaving += 1
            count = 0
            for position in wanted:
                if marks[position] == _WANTED:
                    positions[layer, head, count] = position
                    slots[layer, head, count] = _candidate(candidates, leaving, length, count)
                    count += 1
                marks[position] = 0
            counts[layer, head] = count
            for i in range(free.shape[2]):
                free[layer, head, i] = _candidate(candidates, leaving, length, count + i)


@jit
def _candidate(candidates: np.ndarray, leaving: int, length: int, i: int) -> int:
    """The i-th slot handed out: those that leave, then the ones after the old length."""
    if i < leaving:
        return candidates[i]
    return length + i - leaving

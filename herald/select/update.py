"""From a selection to the rows that travel: which, from where, and into which slots. nogil numba.

The same in C++: csrc/update.cpp. `plan_reference` in `herald.select.reference` is what both must give.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from herald.errors import ResidentSetTooSmall, UsageError
from herald.jit import jit
from herald.kvstore.pool import HostPool


class SlotGeometry(NamedTuple):
    """Where a request's rows lie in the arena.

    Row i of (layer l, head h) is flat arena row ``(l * H + h) * capacity + row_start + i``; rows
    ``[0, num_slots)`` are slots, the next ``num_staging`` the staging rows.
    """

    capacity: int
    row_start: int
    num_slots: int
    num_staging: int


class Plan(NamedTuple):
    """Rows to copy, and the slots afterwards. Flat arrays are in (layer, head, position) order.

    Attributes:
        src_rows: int64 [n], flat pool rows of those that travel.
        staging_rows: int64 [n], flat arena rows they land in: staging rows 0, 1 ... of each (layer, head).
        slot_rows: int64 [n], flat arena rows they go to in the end.
        counts: int32 [L, H], how many travel.
        free_rows: int64 [L * H * own_rows], flat arena rows for the finished block's own rows.
        positions: int32 [L, H, S], the slots once the rows that travel and the own rows are written.
    """

    src_rows: np.ndarray
    staging_rows: np.ndarray
    slot_rows: np.ndarray
    counts: np.ndarray
    free_rows: np.ndarray
    positions: np.ndarray

    @property
    def arrivals(self) -> int:
        """Rows that travel, over all layers and heads."""
        return len(self.src_rows)


class UpdateRequest(NamedTuple):
    """The arguments of `Selector.plan_update`, as contiguous int32 arrays."""

    slot_positions: np.ndarray
    length: int
    selected: np.ndarray
    first: int
    last: int
    upto: int
    page_ids: np.ndarray
    own_rows: int
    move_all: bool
    geometry: SlotGeometry

    @property
    def num_target(self) -> int:
        """Rows of the target in each (layer, head)."""
        return self.first + self.selected.shape[2] + self.upto - self.last

    def check(self, pool: HostPool) -> None:
        """Raise what `Selector.plan_update` says, except for positions in ``selected``."""
        layout, shape = pool.layout, (pool.layout.num_layers, pool.layout.num_kv_heads)
        num_slots, wanted = self.geometry.num_slots, self.num_target
        if self.slot_positions.shape != (*shape, num_slots):
            raise UsageError(
                f"slot_positions of shape {self.slot_positions.shape} do not fit",
                f"use {(*shape, num_slots)}",
            )
        if self.selected.ndim != 3 or self.selected.shape[:2] != shape:
            raise UsageError(f"selected of shape {self.selected.shape} does not fit", f"use {(*shape, 'k')}")
        limit = len(self.page_ids) * layout.page_size
        if not 0 <= self.first <= self.last <= self.upto <= limit:
            raise UsageError(
                f"first={self.first}, last={self.last}, upto={self.upto} are not ascending in the pages",
                f"use 0 to {limit}",
            )
        ids = self.page_ids
        if ids.size and (ids.min() < 0 or ids.max() >= pool.num_pages):
            raise UsageError("page_ids name pages that do not exist", f"use 0 to {pool.num_pages - 1}")
        if not 0 <= self.length <= num_slots:
            raise UsageError(f"length={self.length} exceeds the slots", f"use 0 to {num_slots}")
        if self.own_rows < 0:
            raise UsageError(f"own_rows={self.own_rows} is negative", "use 0 or more")
        if wanted + self.own_rows > num_slots:
            raise ResidentSetTooSmall(
                f"{wanted} selected and {self.own_rows} own rows do not fit {num_slots} slots",
                f"select at most {max(0, num_slots - self.own_rows)} rows",
            )
        if wanted + self.own_rows < self.length:
            raise UsageError(
                f"{wanted} selected and {self.own_rows} own rows leave holes in {self.length} slots",
                f"select at least {self.length - self.own_rows} rows",
            )


_BAD_SELECTION = "selected positions are not ascending within [first, last)"


def _bad_selection(request: UpdateRequest) -> UsageError:
    return UsageError(_BAD_SELECTION, f"use positions {request.first} to {request.last - 1}, each once")


def _check_staging(plan: Plan, geometry: SlotGeometry) -> Plan:
    most = int(plan.counts.max(initial=0))
    if most > geometry.num_staging:
        raise ResidentSetTooSmall(
            f"{most} rows arrive for {geometry.num_staging} staging rows", "report this: the bound is wrong"
        )
    return plan


def plan_with_native(native: Any, request: UpdateRequest, pool: HostPool, num_threads: int) -> Plan:
    """`Selector.plan_update` by ``herald._native``."""
    request.check(pool)
    geometry, layout = request.geometry, pool.layout
    try:
        found = native.plan_update(
            *request[:9], geometry.capacity, geometry.row_start, pool.num_pages, layout.page_size, num_threads
        )
    except ValueError as error:
        if str(error) != _BAD_SELECTION:
            raise
        raise _bad_selection(request) from None
    return _check_staging(Plan(*found), geometry)


def plan_with_numba(
    request: UpdateRequest, pool: HostPool, executor: ThreadPoolExecutor | None, num_threads: int
) -> Plan:
    """`Selector.plan_update` by numba, over the threads of ``executor`` (None: on this one)."""
    request.check(pool)
    layers, heads = request.selected.shape[:2]
    tasks, geometry = layers * heads, request.geometry
    where = np.empty((tasks, request.num_target), dtype=np.int32)
    slots = np.empty_like(where)
    free = np.empty((tasks, request.own_rows), dtype=np.int32)
    counts = np.empty(tasks, dtype=np.int32)
    held = request.slot_positions.reshape(tasks, -1)
    chosen = request.selected.reshape(tasks, -1)

    def plan(begin: int, end: int) -> None:
        part = slice(begin, end)
        span = (request.length, request.first, request.last, request.upto, request.move_all)
        _plan(held[part], chosen[part], *span, where[part], slots[part], free[part], counts[part])

    _in_parts(plan, tasks, executor, num_threads)
    if counts.min(initial=0) < 0:
        raise _bad_selection(request)
    begins = np.zeros(tasks + 1, dtype=np.int64)
    np.cumsum(counts, out=begins[1:])
    src, staging, slot = (np.empty(begins[-1], dtype=np.int64) for _ in range(3))
    free_rows = np.empty((tasks, request.own_rows), dtype=np.int64)
    positions = np.empty_like(held)

    def write(begin: int, end: int) -> None:
        _write(
            *((begin, end), begins, where, slots, free, held, request.page_ids, request.upto, heads),
            *(geometry.capacity, geometry.row_start, pool.num_pages, pool.layout.page_size),
            *(src, staging, slot, free_rows, positions),
        )

    _in_parts(write, tasks, executor, num_threads)
    shaped = positions.reshape(request.slot_positions.shape)
    plan_made = Plan(src, staging, slot, counts.reshape(layers, heads), free_rows.reshape(-1), shaped)
    return _check_staging(plan_made, geometry)


def _in_parts(
    work: Callable[[int, int], None], tasks: int, executor: ThreadPoolExecutor | None, num_threads: int
) -> None:
    if executor is None:
        work(0, tasks)
        return
    edges = [tasks * part // num_threads for part in range(num_threads + 1)]
    jobs = [executor.submit(work, begin, end) for begin, end in pairwise(edges) if end > begin]
    for job in jobs:
        job.result()


# State of a position while a (layer, head) is planned; a resident one has slot + _RESIDENT.
_ABSENT, _WANTED, _RESIDENT = np.int32(0), np.int32(1), np.int32(2)


@jit
def _in_order(selected: np.ndarray, first: int, last: int) -> bool:
    before = first - 1
    for position in selected:
        if position <= before or position >= last:
            return False
        before = position
    return True


@jit
def _slot(leaving: np.ndarray, gone: int, length: int, i: int) -> int:
    """The i-th slot handed out: those that leave, then the ones after the old length."""
    return leaving[i] if i < gone else length + i - gone


@jit
def _plan(
    held: np.ndarray,
    selected: np.ndarray,
    length: int,
    first: int,
    last: int,
    upto: int,
    move_all: bool,
    where: np.ndarray,
    slots: np.ndarray,
    free: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Some (layer, head)s, arrays [tasks, ...]. A count of -1 says that ``selected`` is not in order."""
    state = np.zeros(upto, dtype=np.int32)
    leaving = np.empty(length, dtype=np.int32)
    num_selected = selected.shape[1]
    for task in range(held.shape[0]):
        if not _in_order(selected[task], first, last):
            counts[task] = -1
            continue
        state[:first] = _WANTED
        state[last:] = _WANTED
        for position in selected[task]:
            state[position] = _WANTED
        gone = 0
        for slot in range(length):
            position = held[task, slot]
            if 0 <= position < upto and state[position] == _WANTED:
                state[position] = slot + _RESIDENT
            else:
                leaving[gone] = slot
                gone += 1
        count = 0
        handed_out = 0
        for i in range(where.shape[1]):
            if i < first:
                position = i
            elif i < first + num_selected:
                position = selected[task, i - first]
            else:
                position = i - first - num_selected + last
            found = state[position]
            state[position] = _ABSENT
            if found == _WANTED:
                where[task, count] = position
                slots[task, count] = _slot(leaving, gone, length, handed_out)
                handed_out += 1
                count += 1
            elif move_all and position < last:
                where[task, count] = position
                slots[task, count] = found - _RESIDENT
                count += 1
        counts[task] = count
        for i in range(free.shape[1]):
            free[task, i] = _slot(leaving, gone, length, handed_out + i)


@jit
def _write(
    tasks: tuple[int, int],
    begins: np.ndarray,
    where: np.ndarray,
    slots: np.ndarray,
    free: np.ndarray,
    held: np.ndarray,
    page_ids: np.ndarray,
    upto: int,
    num_heads: int,
    capacity: int,
    row_start: int,
    num_pages: int,
    page_size: int,
    src: np.ndarray,
    staging: np.ndarray,
    slot_rows: np.ndarray,
    free_rows: np.ndarray,
    positions: np.ndarray,
) -> None:
    """Flat rows of tasks ``tasks[0] .. tasks[1]``, and their slots afterwards."""
    num_slots = held.shape[1]
    for task in range(tasks[0], tasks[1]):
        base = np.int64(task) * capacity + row_start
        layer, head = task // num_heads, task % num_heads
        for slot in range(num_slots):
            positions[task, slot] = held[task, slot]
        begin = begins[task]
        for i in range(begins[task + 1] - begin):
            position, slot = where[task, i], slots[task, i]
            page = layer * num_pages + np.int64(page_ids[position // page_size])
            src[begin + i] = (page * num_heads + head) * page_size + position % page_size
            staging[begin + i] = base + num_slots + i
            slot_rows[begin + i] = base + slot
            positions[task, slot] = position
        for i in range(free.shape[1]):
            free_rows[task, i] = base + free[task, i]
            positions[task, free[task, i]] = upto + i

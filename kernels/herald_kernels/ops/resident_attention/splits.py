"""Into how many pieces resident sets are cut: all alike, by the shape of the call alone.

Pieces let a call of few lanes use the whole device. They cost a second kernel and the bytes of their partial
results, so that a call whose whole sets fill the device once is not cut.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Costs in rows of a set, 64 of which take 1.07 us on an H200 whose multiprocessors all work on 128 queries.
START = 180.0  # of a program, beside its rows
COMBINE = 60.0  # of the second kernel
PARTIAL = 0.018  # of a query row's partial result, written and read
ALONE = 0.68  # time of a row where a multiprocessor could run more than the one program it has
MAX_PIECES = 64
# Partial results of a call take no more than this.
WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class Plan:
    """How every set of a call is cut.

    Args:
        tiles_per_piece: tiles of a piece, at most.
        pieces: of the longest set; 1 if nothing is cut.
    """

    tiles_per_piece: int
    pieces: int


@dataclass(frozen=True)
class Device:
    """What programs run on.

    Args:
        multiprocessors: of the device.
        programs_each: programs that one multiprocessor runs at once.
    """

    multiprocessors: int
    programs_each: int


def round_length(max_length: int) -> int:
    """``max_length`` rounded up to one of four steps between powers of two: near lengths share their bits."""
    step = 1 << max(0, max_length.bit_length() - 3)
    return -(-max_length // step) * step


def makespan(programs: int, rows: int, device: Device) -> float:
    """Cost of equal programs of ``rows`` rows: full waves, then what is left of them."""
    waves, late = divmod(programs, device.multiprocessors * device.programs_each)
    cost = waves * (START + rows)
    if late:
        alone = device.programs_each > 1 and late <= device.multiprocessors
        cost += START + (ALONE if alone else 1.0) * rows
    return cost


@functools.lru_cache(maxsize=4096)
def plan(num_tiles: int, keys: int, programs: int, queries: int, head_dim: int, device: Device) -> Plan:
    """The cheapest number of pieces, the fewest where two cost the same.

    Args:
        num_tiles: of the longest set.
        keys: rows of a tile.
        programs: of the call if no set were cut.
        queries: query rows of the call, over all lanes and heads.
        head_dim: values of a partial result, in float32, beside its log-sum-exp.
        device: what it runs on.
    """
    best, best_cost = Plan(num_tiles, 1), makespan(programs, num_tiles * keys, device)
    for wanted in range(2, min(MAX_PIECES, num_tiles) + 1):
        tiles_per_piece = -(-num_tiles // wanted)
        pieces = -(-num_tiles // tiles_per_piece)
        if pieces * queries * (head_dim + 1) * 4 > WORKSPACE_BYTES:
            break
        cost = makespan(programs * pieces, tiles_per_piece * keys, device)
        cost += COMBINE + PARTIAL * pieces * queries
        if cost < best_cost:
            best, best_cost = Plan(tiles_per_piece, pieces), cost
    return best

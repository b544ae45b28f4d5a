"""Dot products of a tile of rows with all queries: the inner loop of selection, as LLVM vector code.

Four kernels with one shape, dots of rows with queries:

    dots (uint8 rows):   codes + 128 against int8 query codes with AVX-512 VNNI (`vpdpbusd`), 64 products an
                         instruction, accumulated in int32; every dot as float32.
    dots (float32 rows): the same codes as floats. |sum| < 2 ** 24, so every partial sum is an exact integer
                         and fused multiply-add, where the CPU has it, changes nothing. The fallback.
    largest_sums:        either kind of codes; of each row the largest dot + a start of the query, in int32.
    exact_dots:          float32 values; a chain of fma in order of the dimension, so that a plain loop of
                         fma anywhere gives the same bits.

Both kinds of codes agree bit by bit, whatever the CPU. Queries stand side by side in the lanes of a vector
and a row's element is broadcast, so no horizontal sum is needed and rows are read as they lie in memory.
Tiles of 4 rows x 4 vectors keep 16 accumulators, 4 query vectors and 4 broadcasts in the 32 registers of
AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload, register_jitable

from herald.jit import jit
from herald.kvstore.vectors import (
    FLOATS,
    INT32,
    LANES,
    accumulator,
    array_data,
    broadcast,
    fused,
    load_vector,
    require_contiguous,
    store_vector,
    swap_lanes,
)

TILE_ROWS = 4
_INTEGERS = ir.VectorType(INT32, LANES)


def _host_has(*features: str) -> bool:
    """Whether numba compiles for this CPU as it is, and the CPU has ``features`` (LLVM's names)."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    host = llvmlite.binding.get_host_cpu_features()
    return all(host.get(feature, False) for feature in features)


HAS_VNNI = _host_has("avx512f", "avx512bw", "avx512vnni")
# Without 32 registers of 512 bits a 4 x 4 tile would spill.
_TILE_VECTORS = 4 if _host_has("avx512f") else 1


def _multiply_add(builder: Any, total: Any, row: Any, query: Any, vnni: bool, exact: bool) -> Any:
    if vnni:
        kind = ir.FunctionType(_INTEGERS, [_INTEGERS] * 3)
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [total, row, query])
    if exact:
        return fused(builder, row, query, total)
    # These are integers: fused or not is the same, and a CPU without the instruction need not imitate it.
    flags = ("contract",)
    return builder.fadd(total, builder.fmul(row, query, flags=flags), flags=flags)


def _largest(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _make_tile(vectors: int, exact: bool = False, largest: bool = False) -> Callable:
    """The kernel of one tile: `TILE_ROWS` rows from ``row`` times ``vectors * 16`` queries from ``query``.

    ``out`` gets every dot, or with ``largest`` keeps the larger of itself and the sums, lane by lane.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        rows: Any,
        row: Any,
        queries: Any,
        query: Any,
        steps: Any,
        width: Any,
        starts: Any,
        out: Any,
    ) -> Any:
        require_contiguous(rows, queries, starts, out)
        vnni = rows.dtype == types.uint8
        signature = types.void(rows, types.intp, queries, types.intp, types.intp, types.intp, starts, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, first_row, _, first_query, steps, width, _, _ = args
            element = INT32 if vnni else ir.FloatType()
            vector_type = _INTEGERS if vnni else FLOATS

            def pointer(position: int, kind: Any) -> Any:
                data = array_data(context, builder, signature.args[position], args[position])
                return builder.bitcast(data, kind.as_pointer())

            def plus(value: Any, number: int) -> Any:
                return builder.add(value, ir.Constant(value.type, number))

            row_data, query_data, start_data = pointer(0, element), pointer(2, element), pointer(6, INT32)
            row_starts = [
                builder.gep(row_data, [builder.mul(plus(first_row, r), steps)]) for r in range(TILE_ROWS)
            ]
            totals = [[accumulator(builder, vector_type) for _ in range(vectors)] for _ in range(TILE_ROWS)]
            first = [
                load_vector(builder, builder.gep(start_data, [plus(first_query, v * LANES)]), _INTEGERS)
                for v in range(vectors)
            ]
            if vnni:
                for row_totals in totals:
                    for total, start in zip(row_totals, first):
                        builder.store(start, total)
            with cgutils.for_range(builder, steps) as loop:
                start = builder.add(builder.mul(loop.index, width), first_query)
                lanes = [
                    load_vector(builder, builder.gep(query_data, [plus(start, v * LANES)]), vector_type)
                    for v in range(vectors)
                ]
                for r in range(TILE_ROWS):
                    scalar = builder.load(builder.gep(row_starts[r], [loop.index]), align=1 if vnni else 4)
                    copies = broadcast(builder, scalar)
                    for v in range(vectors):
                        total = builder.load(totals[r][v])
                        total = _multiply_add(builder, total, copies, lanes[v], vnni, exact)
                        builder.store(total, totals[r][v])
            out_data = pointer(7, INT32 if largest else ir.FloatType())
            for r in range(TILE_ROWS):
                values = [builder.load(total) for total in totals[r]]
                if largest:
                    if not vnni:
                        values = [
                            builder.add(builder.fptosi(value, _INTEGERS), start)
                            for value, start in zip(values, first)
                        ]
                    at = builder.gep(out_data, [builder.mul(plus(first_row, r), width.type(LANES))])
                    best = load_vector(builder, at, _INTEGERS)
                    for value in values:
                        best = _largest(builder, value, best)
                    store_vector(builder, best, at)
                    continue
                for v, value in enumerate(values):
                    if vnni:
                        value = builder.sitofp(value, FLOATS)
                    to = builder.add(builder.mul(plus(first_row, r), width), plus(first_query, v * LANES))
                    store_vector(builder, value, builder.gep(out_data, [to]))
            return context.get_dummy_value()

        return signature, generate

    return tile


_dots_1, _dots_2, _dots_3, _dots_4 = (_make_tile(vectors) for vectors in (1, 2, 3, 4))
_largest_1, _largest_2, _largest_3, _largest_4 = (_make_tile(v, largest=True) for v in (1, 2, 3, 4))
_exact_1, _exact_4 = (_make_tile(vectors, exact=True) for vectors in (1, 4))


@jit
def dots(
    rows: np.ndarray, count: int, queries: np.ndarray, steps: int, starts: np.ndarray, out: np.ndarray
) -> None:
    """Exact integer dots of code rows with query codes, as float32.

    Args:
        rows: [>= count rounded up to 4, n] uint8 (codes + 128, needs VNNI) or float32 (codes).
        count: rows wanted; up to 3 rows of ``out`` after them are overwritten too.
        queries: for uint8 rows int8 [n / 4, width, 4], else float32 [n, width, 1].
        steps: n / 4 for uint8 rows, else n.
        starts: int32 [width], -128 * the sum of each query's codes (used for uint8 rows).
        out: [rows, width] float32; width a multiple of 16.
    """
    width = out.shape[1]
    query = 0
    while query < width:
        vectors = min(_TILE_VECTORS, (width - query) // 16)
        if vectors == 4:
            for row in range(0, count, 4):
                _dots_4(rows, row, queries, query, steps, width, starts, out)
        elif vectors == 3:
            for row in range(0, count, 4):
                _dots_3(rows, row, queries, query, steps, width, starts, out)
        elif vectors == 2:
            for row in range(0, count, 4):
                _dots_2(rows, row, queries, query, steps, width, starts, out)
        else:
            for row in range(0, count, 4):
                _dots_1(rows, row, queries, query, steps, width, starts, out)
        query += vectors * 16


@jit
def largest_sums(
    rows: np.ndarray,
    count: int,
    queries: np.ndarray,
    steps: int,
    starts: np.ndarray,
    best: np.ndarray,
    out: np.ndarray,
) -> None:
    """``out[r] = max over q of rows[r] . queries[q] + starts[q]`` in int32. Other arguments as for `dots`.

    Args:
        starts: int32 [width]; for uint8 rows less 128 * the sum of each query's codes.
        best: int32 [rows, 16], scratch.
        out: int32 [>= count].
    """
    best[: (count + 3) // 4 * 4] = np.int32(-(2**31))
    width = starts.size
    query = 0
    while query < width:
        vectors = min(_TILE_VECTORS, (width - query) // 16)
        if vectors == 4:
            for row in range(0, count, 4):
                _largest_4(rows, row, queries, query, steps, width, starts, best)
        elif vectors == 3:
            for row in range(0, count, 4):
                _largest_3(rows, row, queries, query, steps, width, starts, best)
        elif vectors == 2:
            for row in range(0, count, 4):
                _largest_2(rows, row, queries, query, steps, width, starts, best)
        else:
            for row in range(0, count, 4):
                _largest_1(rows, row, queries, query, steps, width, starts, best)
        query += vectors * 16
    for r in range(count):
        out[r] = _largest_lane(best, r)


@jit
def exact_dots(
    rows: np.ndarray, count: int, queries: np.ndarray, starts: np.ndarray, out: np.ndarray
) -> None:
    """float32 dots, a chain of fma in order of the dimension. Arguments as for `dots` with float32 rows."""
    steps = rows.shape[1]
    width = out.shape[1]
    query = 0
    while query < width:
        if _TILE_VECTORS == 4 and width - query >= 64:
            for row in range(0, count, 4):
                _exact_4(rows, row, queries, query, steps, width, starts, out)
            query += 64
        else:
            for row in range(0, count, 4):
                _exact_1(rows, row, queries, query, steps, width, starts, out)
            query += 16


@intrinsic
def _largest_lane(typing_context: Any, best: Any, row: Any) -> Any:
    """The largest of ``best[row]``, int32 [., 16]."""
    require_contiguous(best)
    signature = types.int32(best, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature.args[0], args[0])
        at = builder.mul(args[1], args[1].type(LANES))
        value = load_vector(builder, builder.gep(data, [at]), _INTEGERS)
        for step in (8, 4, 2, 1):
            value = _largest(builder, value, swap_lanes(builder, value, step))
        return builder.extract_element(value, ir.Constant(INT32, 0))

    return signature, generate


@intrinsic
def largest_score(typing_context: Any, tile: Any, row: Any, width: Any, factor: Any, shifts: Any) -> Any:
    """max over q of ``fma(tile[row, q], factor, shifts[q])``. width % 16 == 0."""
    require_contiguous(tile, shifts)
    signature = types.float32(tile, types.intp, types.intp, types.float32, shifts)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, width, factor, _ = args
        tile_data, shift_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 4))
        start = builder.mul(row, width)
        factors = broadcast(builder, factor)
        best = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [float("-inf")] * LANES))

        def keep_larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        with cgutils.for_range_slice(
            builder, ir.Constant(width.type, 0), width, ir.Constant(width.type, LANES)
        ) as (q, _):
            value = load_vector(builder, builder.gep(tile_data, [builder.add(start, q)]), FLOATS)
            shift = load_vector(builder, builder.gep(shift_data, [q]), FLOATS)
            score = fused(builder, value, factors, shift)
            builder.store(keep_larger(score, builder.load(best)), best)
        value = builder.load(best)
        for step in (8, 4, 2, 1):
            value = keep_larger(value, swap_lanes(builder, value, step))
        return builder.extract_element(value, ir.Constant(INT32, 0))

    return signature, generate


def unpack(codes: np.ndarray, start: int, count: int, bits: int, out: np.ndarray) -> None:
    """Inside njit: codes of rows ``start .. start + count`` of a page, one element a dimension.

    ``codes`` [page_size, W] uint8 -> ``out[:count]`` [., n]: uint8 (value + 128) or float32 (value).
    """
    raise NotImplementedError("only callable from compiled code")


@overload(unpack, strict=False)
def _unpack(codes: Any, start: Any, count: Any, bits: Any, out: Any) -> Callable:
    return _unpack_bytes if out.dtype == types.uint8 else _unpack_floats


@jit
def _unpack_row(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """One row's 4-bit or 1-bit codes as value + 128. Every branch is a run of contiguous bytes."""
    width = codes.size
    if bits == 4:
        low, high = out[:width], out[width:]
        for i in range(width):
            low[i] = (codes[i] & np.uint8(15)) + np.uint8(120)
        for i in range(width):
            high[i] = (codes[i] >> np.uint8(4)) + np.uint8(120)
        return
    for j in range(8):
        part = out[j * width : (j + 1) * width]
        for i in range(width):
            part[i] = np.uint8(127) + np.uint8(2) * ((codes[i] >> np.uint8(j)) & np.uint8(1))


@jit
def _flip_signs(codes: np.ndarray, out: np.ndarray) -> None:
    for i in range(codes.size):
        out[i] = codes[i] ^ np.uint8(128)


@register_jitable
def _unpack_bytes(codes: np.ndarray, start: int, count: int, bits: int, out: np.ndarray) -> None:
    if bits == 8:
        _flip_signs(codes[start : start + count].reshape(-1), out[:count].reshape(-1))
        return
    for r in range(count):
        _unpack_row(codes[start + r], bits, out[r])


def _unpack_floats(codes: np.ndarray, start: int, count: int, bits: int, out: np.ndarray) -> None:
    values = np.empty((count, out.shape[1]), dtype=np.uint8)
    _unpack_bytes(codes, start, count, bits, values)
    for r in range(count):
        for d in range(out.shape[1]):
            out[r, d] = np.float32(np.int32(values[r, d]) - np.int32(128))

"""Dot products of a tile of rows with all queries: the inner loop of selection, as LLVM vector code.

Three kernels with one shape, ``out[r, q] = rows[r] . queries[q]`` in float32:

    dots (uint8 rows):   codes + 128 against int8 query codes with AVX-512 VNNI (`vpdpbusd`), 64 products an
                         instruction, accumulated in int32.
    dots (float32 rows): the same codes as floats. |sum| < 2 ** 24, so every partial sum is an exact integer
                         and fused multiply-add, where the CPU has it, changes nothing. The fallback.
    exact_dots:          float32 values; each product is rounded and added in order of the dimension,
                         never fused, so that a plain loop anywhere gives the same bits.

The first two agree bit by bit, whatever the CPU. Queries stand side by side in the lanes of a vector and a
row's element is broadcast, so no horizontal sum is needed and rows are read as they lie in memory. Tiles of
4 rows x 4 vectors keep 16 accumulators, 4 query vectors and 4 broadcasts in the 32 registers of AVX-512.
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


def _multiply_add(builder: Any, total: Any, row: Any, query: Any, vnni: bool, fused: bool) -> Any:
    if vnni:
        kind = ir.FunctionType(_INTEGERS, [_INTEGERS] * 3)
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [total, row, query])
    flags = ("contract",) if fused else ()
    return builder.fadd(total, builder.fmul(row, query, flags=flags), flags=flags)


def _make_tile(vectors: int, fused: bool) -> Callable:
    """The kernel of one tile: `TILE_ROWS` rows from ``row`` times ``vectors * 16`` queries from ``query``."""

    @intrinsic
    def tile(
        typing_context: Any,
        rows: Any,
        row: Any,
        queries: Any,
        query: Any,
        steps: Any,
        width: Any,
        correction: Any,
        out: Any,
    ) -> Any:
        require_contiguous(rows, queries, correction, out)
        vnni = rows.dtype == types.uint8
        signature = types.void(rows, types.intp, queries, types.intp, types.intp, types.intp, correction, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, first_row, _, first_query, steps, width, _, _ = args
            element = INT32 if vnni else ir.FloatType()
            vector_type = _INTEGERS if vnni else FLOATS

            def pointer(position: int, kind: Any) -> Any:
                data = array_data(context, builder, signature.args[position], args[position])
                return builder.bitcast(data, kind.as_pointer())

            def plus(value: Any, number: int) -> Any:
                return builder.add(value, ir.Constant(value.type, number))

            row_data, query_data = pointer(0, element), pointer(2, element)
            row_starts = [
                builder.gep(row_data, [builder.mul(plus(first_row, r), steps)]) for r in range(TILE_ROWS)
            ]
            totals = [[accumulator(builder, vector_type) for _ in range(vectors)] for _ in range(TILE_ROWS)]
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
                        total = _multiply_add(builder, total, copies, lanes[v], vnni, fused)
                        builder.store(total, totals[r][v])
            out_data, correction_data = pointer(7, ir.FloatType()), pointer(6, INT32)
            for v in range(vectors):
                at = plus(first_query, v * LANES)
                excess = load_vector(builder, builder.gep(correction_data, [at]), _INTEGERS)
                for r in range(TILE_ROWS):
                    total = builder.load(totals[r][v])
                    if vnni:
                        total = builder.sitofp(builder.sub(total, excess), FLOATS)
                    to = builder.add(builder.mul(plus(first_row, r), width), at)
                    store_vector(builder, total, builder.gep(out_data, [to]))
            return context.get_dummy_value()

        return signature, generate

    return tile


_fused_1, _fused_2, _fused_3, _fused_4 = (_make_tile(vectors, True) for vectors in (1, 2, 3, 4))
_plain_1, _plain_4 = (_make_tile(vectors, False) for vectors in (1, 4))


@jit
def dots(
    rows: np.ndarray, count: int, queries: np.ndarray, steps: int, correction: np.ndarray, out: np.ndarray
) -> None:
    """Exact integer dots of code rows with query codes, as float32.

    Args:
        rows: [>= count rounded up to 4, n] uint8 (codes + 128, needs VNNI) or float32 (codes).
        count: rows wanted; up to 3 rows of ``out`` after them are overwritten too.
        queries: for uint8 rows int8 [n / 4, width, 4], else float32 [n, width, 1].
        steps: n / 4 for uint8 rows, else n.
        correction: int32 [width], 128 * the sum of each query's codes (used for uint8 rows).
        out: [rows, width] float32; width a multiple of 16.
    """
    width = out.shape[1]
    query = 0
    while query < width:
        vectors = min(_TILE_VECTORS, (width - query) // 16)
        if vectors == 4:
            for row in range(0, count, 4):
                _fused_4(rows, row, queries, query, steps, width, correction, out)
        elif vectors == 3:
            for row in range(0, count, 4):
                _fused_3(rows, row, queries, query, steps, width, correction, out)
        elif vectors == 2:
            for row in range(0, count, 4):
                _fused_2(rows, row, queries, query, steps, width, correction, out)
        else:
            for row in range(0, count, 4):
                _fused_1(rows, row, queries, query, steps, width, correction, out)
        query += vectors * 16


@jit
def exact_dots(
    rows: np.ndarray, count: int, queries: np.ndarray, correction: np.ndarray, out: np.ndarray
) -> None:
    """float32 dots, summed in order of the dimension, unfused. Arguments as for `dots` with float32 rows."""
    steps = rows.shape[1]
    width = out.shape[1]
    query = 0
    while query < width:
        if _TILE_VECTORS == 4 and width - query >= 64:
            for row in range(0, count, 4):
                _plain_4(rows, row, queries, query, steps, width, correction, out)
            query += 64
        else:
            for row in range(0, count, 4):
                _plain_1(rows, row, queries, query, steps, width, correction, out)
            query += 16


@intrinsic
def largest_score(
    typing_context: Any, tile: Any, row: Any, width: Any, factors: Any, key_scale: Any, offsets: Any
) -> Any:
    """max over q of ``tile[row, q] * (factors[q] * key_scale) + offsets[q]``, unfused. width % 16 == 0."""
    require_contiguous(tile, factors, offsets)
    signature = types.float32(tile, types.intp, types.intp, factors, types.float32, offsets)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, width, _, key_scale, _ = args
        tile_data, factor_data, offset_data = (
            array_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 5)
        )
        start = builder.mul(row, width)
        scales = broadcast(builder, key_scale)
        best = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [float("-inf")] * LANES))

        def keep_larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        with cgutils.for_range_slice(
            builder, ir.Constant(width.type, 0), width, ir.Constant(width.type, LANES)
        ) as (q, _):
            value = load_vector(builder, builder.gep(tile_data, [builder.add(start, q)]), FLOATS)
            factor = builder.fmul(load_vector(builder, builder.gep(factor_data, [q]), FLOATS), scales)
            offset = load_vector(builder, builder.gep(offset_data, [q]), FLOATS)
            score = builder.fadd(builder.fmul(value, factor), offset)
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

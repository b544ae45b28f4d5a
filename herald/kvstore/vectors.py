"""Vector instructions of 16 floats for numba, where the loop vectoriser does not find them.

Plain LLVM vector code, valid on every CPU: the backend picks one 512-bit, two 256-bit or four 128-bit
registers. Nothing is reordered, and fused only where `fused` says so: results equal those of scalar loops bit
by bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INT32 = ir.IntType(32)


def array_data(context: Any, builder: Any, array_type: Any, value: Any) -> Any:
    """Pointer to the first element of a numba array."""
    return context.make_array(array_type)(context, builder, value).data


def require_contiguous(*array_types: Any) -> None:
    """Refuse arrays that raw pointers would misread (at compile time)."""
    for array_type in array_types:
        if array_type.layout != "C":
            raise TypingError(f"{array_type} is not C-contiguous")


def load_vector(builder: Any, pointer: Any, vector_type: Any) -> Any:
    """Load a vector from an element pointer, without assuming more than the element's alignment."""
    return builder.load(builder.bitcast(pointer, vector_type.as_pointer()), align=4)


def store_vector(builder: Any, value: Any, pointer: Any) -> None:
    """Store a vector to an element pointer."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


@intrinsic
def butterfly(typing_context: Any, x: Any, i: Any, j: Any) -> Any:
    """``x[i:i+16], x[j:j+16] = sum, difference`` of the two, on a float32 array."""
    require_contiguous(x)
    signature = types.void(x, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature.args[0], args[0])
        at = [builder.gep(data, [index]) for index in args[1:]]
        a, b = (load_vector(builder, pointer, FLOATS) for pointer in at)
        store_vector(builder, builder.fadd(a, b), at[0])
        store_vector(builder, builder.fsub(a, b), at[1])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def hadamard_16(typing_context: Any, x: Any, i: Any) -> Any:
    """Walsh-Hadamard transform of ``x[i:i+16]`` in place (float32), partners 8, 4, 2 and 1 apart."""
    require_contiguous(x)
    signature = types.void(x, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature.args[0], args[0])
        at = builder.gep(data, [args[1]])
        value = load_vector(builder, at, FLOATS)
        for step in (8, 4, 2, 1):
            signs = ir.Constant(FLOATS, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
            # Times one is exact, so fusing the two changes nothing.
            signed = builder.fmul(value, signs, flags=("contract",))
            value = builder.fadd(signed, swap_lanes(builder, value, step), flags=("contract",))
        store_vector(builder, value, at)
        return context.get_dummy_value()

    return signature, generate


def swap_lanes(builder: Any, value: Any, step: int) -> Any:
    """The vector in which lane i holds lane i ^ ``step`` of ``value``."""
    partners = ir.Constant(ir.VectorType(INT32, LANES), [lane ^ step for lane in range(LANES)])
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), partners)


def broadcast(builder: Any, scalar: Any) -> Any:
    """A vector of `LANES` copies of ``scalar``."""
    vector_type = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding, of floats or vectors of them: one instruction where the CPU has it."""
    kind = a.type
    name = f"llvm.fma.v{LANES}f32" if kind == FLOATS else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of three float32, with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), generate


def accumulator(builder: Any, vector_type: Any) -> Any:
    """A local vector variable, zero at first (kept in a register after optimisation)."""
    element = vector_type.element
    zero = 0.0 if isinstance(element, ir.FloatType) else 0
    return cgutils.alloca_once_value(builder, ir.Constant(vector_type, [ir.Constant(element, zero)] * LANES))

"""Reading keys out of pool rows as float32, in nogil numba.

numpy has no bfloat16, and numba no float16 on the CPU: both are read as uint16 and widened by bit
operations. Everything here is exact: a widened value equals the stored one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def value_kind(dtype: torch.dtype) -> int:
    """The number by which kernels know a pool's dtype."""
    return _KINDS[dtype]


def as_numpy(rows: torch.Tensor) -> np.ndarray:
    """The same memory as a float32 or uint16 array, which kernels can index."""
    if rows.dtype == torch.float32:
        return rows.numpy()
    return rows.view(torch.int16).numpy().view(np.uint16)


def load_keys(rows: np.ndarray, start: int, count: int, kind: int, out: np.ndarray) -> None:
    """Inside njit: ``out[:count, :D] = K of rows[start : start + count]`` as float32.

    Args:
        rows: [page_size, 2 * D] float32 or uint16, K first.
        kind: `FLOAT32`, `BFLOAT16` or `FLOAT16`.
        out: [>= count, D] float32.
    """
    raise NotImplementedError("only callable from compiled code")


@overload(load_keys, strict=False)
def _load_keys(rows: Any, start: Any, count: Any, kind: Any, out: Any) -> Callable:
    return _load_float32 if rows.dtype == types.float32 else _load_16_bit


def _load_float32(rows: np.ndarray, start: int, count: int, kind: int, out: np.ndarray) -> None:
    for r in range(count):
        for d in range(out.shape[1]):
            out[r, d] = rows[start + r, d]


def _load_16_bit(rows: np.ndarray, start: int, count: int, kind: int, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    if kind == 1:
        for r in range(count):
            for d in range(out.shape[1]):
                bits[r, d] = np.uint32(rows[start + r, d]) << np.uint32(16)
        return
    for r in range(count):
        for d in range(out.shape[1]):
            half = np.uint32(rows[start + r, d])
            bits[r, d] = (half & np.uint32(0x7FFF)) << np.uint32(13)
        # 2 ** 112 moves the exponent's bias from 15 to 127, for subnormal numbers too.
        for d in range(out.shape[1]):
            out[r, d] *= np.float32(5.192296858534828e33)
        for d in range(out.shape[1]):
            half = np.uint32(rows[start + r, d])
            special = (
                np.uint32(0x7F800000) if (half & np.uint32(0x7C00)) == np.uint32(0x7C00) else np.uint32(0)
            )
            bits[r, d] |= special | ((half & np.uint32(0x8000)) << np.uint32(16))

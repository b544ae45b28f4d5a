"""Rows of host memory copied by the CPU: numba kernels, and the native extension when it is built."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from herald.jit import jit


@jit
def first_outside(ids: np.ndarray, limit: int) -> int:
    """Index of the first of ``ids`` (int64 [n]) that is not in [0, limit), or -1."""
    # A set sign bit says that some id is outside. Without a branch the loop becomes vector code, and ids
    # are nearly always right.
    signs = np.int64(0)
    for i in range(ids.shape[0]):
        signs |= ids[i] | (limit - 1 - ids[i])
    if signs >= 0:
        return -1
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= limit:
            return i
    return -1


@jit
def copy_listed_rows(dst: np.ndarray, dst_rows: np.ndarray, src: np.ndarray, src_rows: np.ndarray) -> None:
    """``dst[dst_rows[i]] = src[src_rows[i]]`` for two matrices of words and int64 row ids."""
    for i in range(src_rows.shape[0]):
        s, d = src_rows[i], dst_rows[i]
        for j in range(src.shape[1]):
            dst[d, j] = src[s, j]


@jit
def gather_rows(dst: np.ndarray, src: np.ndarray, src_rows: np.ndarray) -> None:
    """``dst[i] = src[src_rows[i]]`` for two matrices of words and int64 row ids."""
    for i in range(src_rows.shape[0]):
        s = src_rows[i]
        for j in range(src.shape[1]):
            dst[i, j] = src[s, j]


def as_bytes(rows: torch.Tensor) -> np.ndarray:
    """A contiguous host matrix as uint8 [rows, row_bytes], without a copy."""
    return rows.view(torch.uint8).numpy()


def as_words(rows: torch.Tensor) -> np.ndarray:
    """A contiguous host matrix as the widest unsigned words that divide a row, without a copy."""
    raw = as_bytes(rows)
    for word in (np.uint64, np.uint32, np.uint16):
        size = np.dtype(word).itemsize
        if raw.shape[1] % size == 0 and raw.ctypes.data % size == 0:
            return raw.view(word)
    return raw


def native_module() -> Any | None:
    """The compiled extension ``herald._native``, or None where it was not built."""
    try:
        return importlib.import_module("herald._native")
    except ImportError:
        return None


class RowPacker:
    """Gathers rows of one host matrix into a dense buffer, over several threads.

    Args:
        src: [rows, width] contiguous host tensor.
        num_threads: threads to copy with, at least 1.

    Attributes:
        name: ``"native"`` or ``"numba"``.
    """

    def __init__(self, src: torch.Tensor, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._native = native_module()
        self.name = "numba" if self._native is None else "native"
        self._src = as_words(src) if self._native is None else as_bytes(src)
        if self._native is None:
            # Compiles the kernel here rather than inside the first block.
            gather_rows(self._src[:0], self._src, np.empty(0, np.int64))
        # One less than the threads: the caller copies a share itself.
        extra = self.num_threads - 1 if self._native is None else 0
        self._pool = ThreadPoolExecutor(extra, thread_name_prefix="herald-pack") if extra else None

    def pack(self, dst: torch.Tensor, src_rows: np.ndarray) -> None:
        """``dst[i] = src[src_rows[i]]``.

        Args:
            dst: contiguous host tensor of at least ``len(src_rows)`` rows.
            src_rows: int64 [n], already known to be inside the source.
        """
        n = len(src_rows)
        if self._native is not None:
            self._native.pack_rows(as_bytes(dst), self._src, src_rows, self._src.shape[1], self.num_threads)
            return
        out = as_words(dst).view(self._src.dtype)
        if self._pool is None:
            gather_rows(out, self._src, src_rows)
            return
        edges = [n * part // self.num_threads for part in range(self.num_threads + 1)]
        parts = [slice(begin, end) for begin, end in pairwise(edges)]
        others = [self._pool.submit(gather_rows, out[p], self._src, src_rows[p]) for p in parts[1:]]
        gather_rows(out[parts[0]], self._src, src_rows[parts[0]])
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

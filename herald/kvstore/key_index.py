"""The key index: compressed keys beside the pool, which the CPU scans instead of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch

from herald.config import IndexBits, check
from herald.errors import UsageError
from herald.hardware import usable_cores
from herald.kvstore.host_memory import HostSlab
from herald.kvstore.key_codes import code_bytes, encode_span, padded_dim, rotation_signs
from herald.kvstore.native import Backend, native_for
from herald.kvstore.pool import HostPool
from herald.kvstore.row_values import FLOAT16, as_numpy, value_kind

# The float tile adds products of codes exactly as long as |sum| <= 127 * 127 * dim < 2 ** 24.
_LARGEST_DIM = 1024


class KeyIndex:
    """Codes, scales and page means of every key in a pool (see `key_codes` for what they mean).

    n is head_dim padded to a power of two, at least 16.

    Args:
        pool: the rows.
        bits: 8, 4 or 1 bit a key component, or 16 for no codes: selection then reads the pool's keys.
        num_threads: threads of an append by the C++ extension, 0 for all usable cores.
        backend: what builds codes: ``"native"`` for the extension, ``"numba"``, or ``"auto"`` for the first
            that can be used. Both give the same codes.
        pin: register the memory with CUDA, so that a device can copy codes from it.

    Attributes:
        codes: uint8 [L, P, H, page_size, n * bits / 8] (int8 codes in two's complement).
        row_scales: float32 [L, P, H, page_size]; with 8 bits [L, P, H, 0].
        mean_codes: int8 [L, P, H, 2, n], the high and the low level of the page's rotated mean.
        page_scales: float32 [L, P, H, 2], the scale of the page's codes (8 bits; else 0) and of its mean.
        arrays: the four of them, in this order, for reading; what writes them does it here.
        signs: float32 [n], the signs of the rotation.
        num_bytes: memory the index takes.
        pinned: whether all of it is registered with CUDA; if not, `pin_reason` says why.
        versions: int64 [P], another number each time a page was written; 0 for one that never was.

    With 16 bits the arrays have no elements and every ``append`` returns at once. Appending to distinct
    (page, layer) pairs from several threads is safe.
    """

    def __init__(
        self,
        pool: HostPool,
        bits: IndexBits = 8,
        num_threads: int = 0,
        backend: Backend = "auto",
        pin: bool = False,
    ) -> None:
        check(bits in (16, 8, 4, 1), "bits", bits, "use 16, 8, 4 or 1")
        layout = pool.layout
        check(
            bits == 16 or padded_dim(layout.head_dim) <= _LARGEST_DIM,
            "head_dim",
            layout.head_dim,
            f"use index_bits=16, or a head_dim of at most {_LARGEST_DIM}",
        )
        self.pool = pool
        self.bits = bits
        self.signs = rotation_signs(layout.head_dim)
        self.kind = value_kind(layout.dtype)
        self.num_threads = num_threads or usable_cores()
        self._native = native_for(backend)
        pages = 0 if bits == 16 else pool.num_pages
        prefix = (layout.num_layers, pages, layout.num_kv_heads)
        shapes = (
            (torch.uint8, (*prefix, layout.page_size, code_bytes(layout.head_dim, bits))),
            (torch.float32, (*prefix, 0 if bits == 8 else layout.page_size)),
            (torch.int8, (*prefix, 2, padded_dim(layout.head_dim))),
            (torch.float32, (*prefix, 2)),
        )
        sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in shapes]
        self.num_bytes = sum(sizes)
        self._slabs = [HostSlab(max(1, size), pin) for size in sizes]
        self.pinned = all(slab.pinned for slab in self._slabs)
        self.pin_reason = next((slab.pin_reason for slab in self._slabs if slab.pin_reason), "")
        arrays = [slab.tensor(*shape).numpy() for slab, shape in zip(self._slabs, shapes)]
        self.codes, self.row_scales, self.mean_codes, self.page_scales = arrays
        self.versions = np.zeros(pages, dtype=np.int64)
        self._writes = itertools.count(1)  # next() is one operation of the interpreter

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.codes, self.row_scales, self.mean_codes, self.page_scales

    @property
    def bytes_per_row(self) -> float:
        """What a scan reads for a row: codes, scale, its share of what the page has; with 16 bits the key."""
        layout = self.pool.layout
        if self.bits == 16:
            return layout.head_dim * layout.dtype.itemsize
        scale_bytes = torch.float32.itemsize
        of_row = code_bytes(layout.head_dim, self.bits) + (0 if self.bits == 8 else scale_bytes)
        return of_row + 2 * (padded_dim(layout.head_dim) + scale_bytes) / layout.page_size

    def append(self, layer: int, page: int, start: int, count: int) -> None:
        """Build the codes of rows ``start .. start + count`` of ``page`` in ``layer``, all heads.

        The page's mean, and with 8 bits its scale, come from the rows appended with ``start == 0``; rows
        appended later use them, so codes that exist never change, and with 8 bits values that are far larger
        than those first ones saturate. The first append to a page's new contents must start at 0.
        """
        self._append_page((layer, layer + 1), page, start, count)

    def append_block(self, page: int, start: int, count: int) -> None:
        """`append` for every layer: a finished block's rows."""
        self._append_page((0, self.pool.layout.num_layers), page, start, count)

    def append_span(
        self,
        page_ids: np.ndarray,
        first: int,
        last: int,
        layers: tuple[int, int] | None = None,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        """Build the codes of positions ``first .. last`` of a request whose pages are ``page_ids``.

        Args:
            layers: (first, last + 1) layer, None for all.
            executor: numba runs on its threads, in pieces of whole pages; None on the calling thread. The
                extension has threads of its own.
        """
        layout = self.pool.layout
        layers = layers or (0, layout.num_layers)
        pages = np.ascontiguousarray(page_ids, dtype=np.int32)
        limit = len(pages) * layout.page_size
        if not 0 <= first <= last <= limit:
            raise UsageError(f"positions {first} to {last} lie outside the pages", f"use 0 to {limit}")
        if pages.size and (pages.min() < 0 or pages.max() >= self.pool.num_pages):
            raise UsageError("page_ids name pages that do not exist", f"use 0 to {self.pool.num_pages - 1}")
        if executor is None or self._native is not None:
            self._encode(layers, pages, first, last)
            return
        piece = max(1, len(pages) // (4 * usable_cores())) * layout.page_size
        starts = [first, *range((first // piece + 1) * piece, last, piece)]
        jobs = [
            executor.submit(self._encode, (layer, layer + 1), pages, low, high)
            for layer in range(*layers)
            for low, high in zip(starts, [*starts[1:], last])
        ]
        for job in jobs:
            job.result()

    def copy_pages(self, other: KeyIndex, layer: int, pages: slice, into: slice) -> None:
        """Take over a layer's codes of another index of the same layout and bits, of ``pages`` there."""
        self.put_pages(layer, into, [array[layer, pages] for array in other.arrays])

    def put_pages(self, layer: int, pages: slice | np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Take over a layer's codes as they are.

        Args:
            pages: n pages, as a slice or int32 [n].
            values: as `arrays`, each of them [n, ..] for this layer.
        """
        for array, of_pages in zip(self.arrays, values, strict=True):
            array[layer, pages] = of_pages
        self._wrote(pages)

    def close(self) -> None:
        """Give the memory back. Closing twice is allowed."""
        if not self._slabs[0].closed:
            del self.codes, self.row_scales, self.mean_codes, self.page_scales
            for slab in self._slabs:
                slab.close()

    def __enter__(self) -> KeyIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append_page(self, layers: tuple[int, int], page: int, start: int, count: int) -> None:
        layout = self.pool.layout
        if not (start >= 0 and count >= 0 and start + count <= layout.page_size):
            raise UsageError(
                f"rows {start} to {start + count} lie outside a page", f"use rows 0 to {layout.page_size}"
            )
        if not 0 <= page < self.pool.num_pages:
            raise UsageError(f"page {page} does not exist", f"use pages 0 to {self.pool.num_pages - 1}")
        self._encode(layers, np.array([page], dtype=np.int32), start, start + count)

    def _encode(self, layers: tuple[int, int], pages: np.ndarray, first: int, last: int) -> None:
        if self.bits == 16 or last <= first:
            return
        if self._native is not None:
            self._native.encode(
                *(as_numpy(self.pool.rows), self.kind == FLOAT16),
                *(*self.arrays, self.signs, self.bits),
                *(pages, first, last, *layers),
                self.num_threads,
            )
        else:
            encode_span(
                as_numpy(self.pool.rows),
                layers,
                pages,
                first,
                last,
                self.kind,
                self.bits,
                self.signs,
                *self.arrays,
            )
        size = self.pool.layout.page_size
        self._wrote(pages[first // size : -(-last // size)])

    def _wrote(self, pages: slice | np.ndarray) -> None:
        """Pages were written: who copied them before has to copy them again."""
        self.versions[pages] = next(self._writes)

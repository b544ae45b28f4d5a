# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `copy_rows`: rows are moved as the widest integers that their alignment allows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_BYTES = 8192
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["num_rows"])
def _copy_rows_kernel(
    dst,
    dst_rows,
    src,
    src_rows,
    num_rows,
    width,
    dst_stride,
    src_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GATHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    to = tl.load(dst_rows + row, mask=row < num_rows, other=-1).to(tl.int64)
    row_valid = to >= 0
    source = row
    if GATHER:
        source = tl.load(src_rows + row, mask=row < num_rows, other=0).to(tl.int64)
    for first in range(0, width, COLS):
        col = first + tl.arange(0, COLS)
        valid = row_valid[:, None] & (col < width)[None, :]
        words = tl.load(src + source[:, None] * src_stride + col[None, :], mask=valid)
        tl.store(dst + to[:, None] * dst_stride + col[None, :], words, mask=valid)


def _as_words(array: torch.Tensor, word: torch.dtype) -> torch.Tensor | None:
    """``array`` reinterpreted as ``word``, or None where a row does not start or end on one."""
    size, element = word.itemsize, array.element_size()
    ends = (
        array.shape[1] * element,
        array.stride(0) * element,
        array.storage_offset() * element,
        array.data_ptr(),
    )
    return None if any(end % size for end in ends) else array.view(word)


def copy_rows(
    dst: torch.Tensor, dst_rows: torch.Tensor, src: torch.Tensor, src_rows: torch.Tensor | None
) -> None:
    """See `herald_kernels.copy_rows`."""
    for word in WORDS:
        dst_words, src_words = _as_words(dst, word), _as_words(src, word)
        if dst_words is not None and src_words is not None:
            break
    assert dst_words is not None and src_words is not None  # bytes always fit
    num_rows, width = dst_rows.numel(), dst_words.shape[1]
    words_per_tile = TILE_BYTES // dst_words.element_size()
    cols = min(triton.next_power_of_2(width), words_per_tile)
    rows = max(1, min(64, words_per_tile // cols))
    _copy_rows_kernel[(triton.cdiv(num_rows, rows),)](
        dst_words,
        dst_rows.contiguous(),
        src_words,
        dst_rows if src_rows is None else src_rows.contiguous(),
        num_rows,
        width,
        dst_words.stride(0),
        src_words.stride(0),
        ROWS=rows,
        COLS=cols,
        GATHER=src_rows is not None,
        num_warps=4,
    )

"""Copy single rows between two 2-D arrays by row number."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def copy_rows(
    dst: torch.Tensor, dst_rows: torch.Tensor, src: torch.Tensor, src_rows: torch.Tensor | None
) -> None:
    """``dst[dst_rows[i]] = src[src_rows[i]]`` for every i whose ``dst_rows[i]`` is not -1.

    Args:
        dst: [Nd, W], any dtype, unit stride in the last dimension; written in place.
        dst_rows: int64 [n], distinct but for the -1 of rows to skip.
        src: [Ns, W], same dtype. May be the tensor ``dst``, if no row is both read and written.
        src_rows: int64 [n], or None for 0 to n - 1.

    Raises:
        ValueError: widths, dtypes, strides or the two numbers of rows do not fit.
    """
    if dst.shape[1] != src.shape[1] or dst.dtype != src.dtype:
        raise ValueError(
            f"rows of dst and src differ: {dst.shape[1]} x {dst.dtype} against {src.shape[1]} x {src.dtype}"
        )
    if src_rows is None:
        if src.shape[0] < dst_rows.numel():
            raise ValueError(f"{dst_rows.numel()} rows to write, but src has {src.shape[0]}")
    elif dst_rows.shape != src_rows.shape:
        raise ValueError(f"{dst_rows.numel()} rows to write, but {src_rows.numel()} to read")
    need_unit_stride(dst=dst, src=src)
    if dst_rows.numel():
        implementation("copy_rows", dst.device.type)(dst, dst_rows, src, src_rows)

"""How programs are shaped: the one table of choices that measurements set, and what follows from it."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tiles:
    """How one program of an attention kernel works.

    Args:
        queries: query rows of a tile.
        keys: key and value rows of a tile.
        num_warps: warps of the program.
        num_stages: tiles of keys and values in flight.
        descriptors: load keys and values through tensor descriptors (TMA) where the device and strides allow.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    descriptors: bool = True


@dataclass(frozen=True)
class Strip:
    """How one program of an element-wise kernel works.

    Args:
        size: values (`silu_mul`) or tokens (`qk_norm_rope`, `route_experts`) of a program; unused where it
            takes a row.
        num_warps: warps of the program.
        heads: heads that a program of `qk_norm_rope` takes one after the other.
    """

    size: int
    num_warps: int
    heads: int = 1


@dataclass(frozen=True)
class ProductTiles:
    """How one program of a matrix product works.

    Args:
        rows: of a tile (tokens).
        columns: of a tile; of gate and up each, where both are made.
        depth: values of the inner dimension that are in a step of the loop.
        num_warps: warps of the program.
        num_stages: steps in flight.
        descriptors: load weights through a tensor descriptor (TMA) where the device and shapes allow.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


# The table: one H200, bf16, head_dim 128, hidden size 4096. `bench_kernels --tune all` measures it again.
RESIDENT = Tiles(64, 64, 4, 3)
RESIDENT_LONG = Tiles(128, 128, 8, 3)  # from LONG_ROWS rows in a call on
PREFILL = Tiles(128, 128, 8, 3)
WIDE_HEADS = Tiles(64, 64, 4, 2)  # head_dim above 128
WIDEST_HEADS = Tiles(64, 32, 8, 2)  # above 256: what fits into shared memory and registers, not measured
EXACT = Tiles(32, 32, 8, 1, descriptors=False)  # float32: products on the FMA units, from registers
LONG_ROWS = 800_000  # lanes x KV heads x rows
RMS_NORM_WARPS = 8
SILU_MUL = Strip(1024, 4)
ROTATE = Strip(8, 4)
ROTATE_MANY = Strip(16, 4, heads=2)  # beyond ROTATE_TOKENS tokens
ROTATE_TOKENS = 640
# Tokens up to which the router's product works so; the last beyond.
ROUTE = (
    (640.0, ProductTiles(16, 32, 128, 4, 3)),
    (float("inf"), ProductTiles(32, 64, 64, 4, 3)),
)
ROUTE_EXACT = ProductTiles(16, 64, 16, 8, 1)  # float32
CHOOSE = Strip(1, 1)
COMBINE = Strip(1024, 4)
# Pairs an expert has on average, up to which (gate and up, down) work so; the last beyond. With few rows it
# counts how many bytes of weights are in flight, with many how often a byte that was read is used.
EXPERTS = (
    (2.0, (ProductTiles(16, 32, 128, 4, 5), ProductTiles(16, 128, 128, 4, 3))),
    (10.0, (ProductTiles(16, 64, 128, 4, 3), ProductTiles(16, 128, 128, 4, 3))),
    (24.0, (ProductTiles(32, 64, 128, 4, 3), ProductTiles(32, 64, 128, 4, 3))),
    (64.0, (ProductTiles(64, 64, 64, 4, 3, True), ProductTiles(64, 128, 64, 4, 3, True))),
    (float("inf"), (ProductTiles(128, 128, 64, 8, 4, True), ProductTiles(128, 256, 64, 8, 4, True))),
)
EXPERTS_EXACT = (ProductTiles(16, 32, 16, 4, 1), ProductTiles(16, 64, 16, 4, 1))  # float32

# Of one multiprocessor.
SHARED_BYTES = 227 << 10
WARPS = 16


def resident_tiles(num_queries: int, head_dim: int, dtype: torch.dtype, total_rows: int) -> Tiles:
    """Tiles of `resident_attention`.

    Args:
        num_queries: query rows of a lane in one KV head.
        total_rows: rows of all sets of the call, over all KV heads.
    """
    tile = _wide_tiles(head_dim, dtype) or RESIDENT
    if tile is RESIDENT and num_queries >= RESIDENT_LONG.queries and total_rows >= LONG_ROWS:
        return RESIDENT_LONG
    queries = min(tile.queries, max(16, 1 << (num_queries - 1).bit_length()))
    return Tiles(queries, tile.keys, tile.num_warps, tile.num_stages, tile.descriptors)


def prefill_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles of `prefill_attention`."""
    return _wide_tiles(head_dim, dtype) or PREFILL


def _wide_tiles(head_dim: int, dtype: torch.dtype) -> Tiles | None:
    """Tiles of either attention where the usual ones do not fit."""
    if dtype == torch.float32:
        return EXACT
    return WIDEST_HEADS if head_dim > 256 else WIDE_HEADS if head_dim > 128 else None


def expert_tiles(
    pairs_an_expert: float, dtype: torch.dtype, shared_bytes: int = SHARED_BYTES
) -> tuple[ProductTiles, ProductTiles]:
    """Tiles of `expert_mlp`: of the product of gate and up, and of that of down; both have as many rows.

    Args:
        shared_bytes: of a multiprocessor, for one program: where the tiles for so many pairs need more, those
            for fewer are taken, or the first for more that fit.

    Raises:
        ValueError: none fits.
    """
    if dtype == torch.float32:
        return EXPERTS_EXACT
    place = next(i for i, (most, _) in enumerate(EXPERTS) if pairs_an_expert <= most)
    in_turn = (*reversed(EXPERTS[: place + 1]), *EXPERTS[place + 1 :])
    for _, (gate_up, down) in in_turn:
        if max(product_bytes(gate_up, 2), product_bytes(down, 1)) <= shared_bytes:
            return gate_up, down
    raise ValueError(f"no tile of expert_mlp fits into {shared_bytes:,} bytes of shared memory")


def product_bytes(tile: ProductTiles, parts: int) -> int:
    """Bytes of shared memory of a 16-bit product with ``parts`` matrices of weights."""
    return 2 * tile.num_stages * tile.depth * (tile.rows + parts * tile.columns)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have there."""
    if device.type != "cuda":
        return SHARED_BYTES
    active = importlib.import_module("triton").runtime.driver.active
    return int(active.utils.get_device_properties(device.index)["max_shared_mem"])


def router_tiles(num_tokens: int, dtype: torch.dtype) -> ProductTiles:
    """Tiles of the product of `route_experts`."""
    return ROUTE_EXACT if dtype == torch.float32 else next(tile for most, tile in ROUTE if num_tokens <= most)


def rotate_strip(num_tokens: int) -> Strip:
    """Strip of `qk_norm_rope`."""
    return ROTATE_MANY if num_tokens > ROTATE_TOKENS else ROTATE


def programs_per_multiprocessor(tile: Tiles, head_dim: int, element_size: int) -> int:
    """How many programs with these tiles a multiprocessor runs at once: by shared memory and by registers."""
    shared = (2 * tile.num_stages * tile.keys + tile.queries) * head_dim * element_size
    return max(1, min(SHARED_BYTES // shared, WARPS // tile.num_warps))


@functools.cache
def _has_descriptors(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def aligned_rows(rows: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    return not any(
        size % 16 for size in (rows.data_ptr(), *(n * rows.element_size() for n in rows.stride()[:-1]))
    )


def matrix_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """A descriptor of a matrix in blocks [rows, columns]; None where the device or alignment rules it out."""
    if not aligned_rows(matrix) or (matrix.is_cuda and not _has_descriptors(matrix.device.index)):
        return None
    return _descriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor(
        tensor, shape, strides, block
    )


def row_descriptor(rows: torch.Tensor, tile: Tiles) -> Any:
    """A descriptor of ``rows`` [H, n, 2 * head_dim] as a matrix of rows, or None to load through pointers.

    ``rows[head, i]`` is row ``head * stride(0) / stride(1) + i`` of the matrix.
    """
    if not tile.descriptors or not rows.shape[1]:
        return None
    stride_head, stride_row = rows.stride()[:2]
    if not aligned_rows(rows) or stride_row < rows.shape[2] or stride_head % stride_row:
        return None
    if rows.is_cuda and not _has_descriptors(rows.device.index):
        return None
    height = (rows.shape[0] - 1) * (stride_head // stride_row) + rows.shape[1]
    return _descriptor(rows, [height, rows.shape[2]], [stride_row, 1], [tile.keys, rows.shape[2] // 2])

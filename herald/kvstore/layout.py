"""How rows, pages and tokens map to bytes of the host pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from herald.config import check

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Pages of about this many positions: long enough that a page's codes are a few KiB of sequential reads
# and its mean costs little, short enough that a request wastes little of its last page.
_TARGET_PAGE_SIZE = 64


@dataclass(frozen=True)
class RowLayout:
    """Shape of the KV cache in host memory. A row is one token's K|V in one KV head of one layer.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        page_size: token positions a page holds.
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        InvalidOption: a size is below 1, or the dtype is none of the three.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, field)
            check(value >= 1, field, value, "use 1 or more")
        check(self.dtype in DTYPES, "dtype", self.dtype, "use torch.float32, torch.float16 or torch.bfloat16")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: K and V of one token in one KV head of one layer."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and KV heads."""
        return self.page_size * self.token_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` positions take."""
        return -(-num_tokens // self.page_size)


def choose_page_size(block_length: int, page_size: int = 0) -> int:
    """Page size for a block length: the option when given, else about 64 positions in whole blocks.

    Raises:
        InvalidOption: ``page_size`` is not a multiple of ``block_length``.
    """
    if page_size == 0:
        return block_length * max(1, _TARGET_PAGE_SIZE // block_length)
    check(
        page_size > 0 and page_size % block_length == 0,
        "page_size",
        page_size,
        f"use a multiple of the block length, such as {block_length * max(1, page_size // block_length)}",
    )
    return page_size

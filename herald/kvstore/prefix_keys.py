"""Names of pages: what a page holds, and how it was computed, as chained hashes.

The KV of a block-causal model depends on the tokens before the end of its block, so a finished page is
named by its own tokens and the name of the page before it. Its bits depend on one thing more: products of
other shapes round otherwise, so a second chain also takes in how many positions were computed together, and
the budget that an answer was decoded with: its rows are what a share of the rows before them made of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Pages that no prefill of this engine would compute bit for bit: made by decoding, or by another prefill.
FREE_PIECE = 0
_DIGEST_BYTES = 16


class Made(NamedTuple):
    """How the rows of a page came about.

    Attributes:
        piece: positions that were computed together with its own, or `FREE_PIECE`.
        kv_budget: the least share of rows that it, or a page before it, was decoded with; 1 for a prefill of
            nothing but prefilled pages.
    """

    piece: int
    kv_budget: float = 1.0


def root_key(block_length: int) -> bytes:
    """The name before the first page: requests of other block lengths see other positions."""
    return _digest(f"herald prefix, block_length={block_length}".encode())


def token_keys(
    root: bytes, tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Names of the whole pages of ``tokens`` by content alone.

    Args:
        known: names of the first pages, if they were computed before.
    """
    keys = list(known)
    whole = len(tokens) // page_size
    key = keys[-1] if keys else root
    fresh = np.asarray(tokens[len(keys) * page_size : whole * page_size], dtype=np.int64)
    for page in fresh.reshape(-1, page_size):
        key = _digest(key + page.tobytes())
        keys.append(key)
    return keys


def exact_keys(
    root: bytes, names: Sequence[bytes], made: Sequence[Made], known: Sequence[bytes] = ()
) -> list[bytes]:
    """Names of pages by content and by the way they were computed.

    Args:
        names: their `token_keys`.
        made: how each page was computed.
        known: names of the first pages, if they are known.
    """
    keys = list(known)
    key = keys[-1] if keys else root
    for name, (piece, budget) in zip(names[len(keys) :], made[len(keys) :], strict=True):
        key = _digest(key + name + struct.pack("<qd", piece, budget))
        keys.append(key)
    return keys


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()

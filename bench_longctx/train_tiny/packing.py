"""Many documents and their questions packed into one row of tokens, and who sees whom in it.

A document is followed by branches: every question is laid out as if it were the only one, at the positions
right after the document. A branch has clean blocks (the document's tail, the question, and the answer up to
its last block) and noisy copies of the answer's blocks. Visibility is the same for all 16 tokens of a block:

* a block sees itself;
* a block sees the document blocks, and its own branch's clean blocks, at lower block numbers.

So a noisy block sees exactly what it sees in decoding. Padding blocks see themselves only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 16
TILE = 128


@dataclass
class Packed:
    """One packed row, as numpy arrays (from the generator) or tensors (on the device).

    tokens [S]; per block [S / 16] int32: `number` (its block number), `query_document`, `query_branch`, and
    `key_document`, `key_branch`, which are -1 where nobody else may see the block. Loss slots [T]: `slots`
    (index into S), `targets`, `weights` (0 for unused slots) and `kinds` (for the accuracy by task).
    """

    tokens: np.ndarray | Tensor
    number: np.ndarray | Tensor
    query_document: np.ndarray | Tensor
    query_branch: np.ndarray | Tensor
    key_document: np.ndarray | Tensor
    key_branch: np.ndarray | Tensor
    slots: np.ndarray | Tensor
    targets: np.ndarray | Tensor
    weights: np.ndarray | Tensor
    kinds: np.ndarray | Tensor

    @classmethod
    def empty(cls, size: int, slots: int, pad: int) -> Packed:
        """A row of `size` padding tokens with room for `slots` losses."""
        blocks = size // BLOCK

        def ids(fill: int) -> np.ndarray:
            return np.full(blocks, fill, np.int32)

        return cls(
            np.full(size, pad, np.int32),
            ids(0),
            ids(-2),
            ids(-2),
            ids(-1),
            ids(-1),
            np.arange(slots, dtype=np.int32),
            np.zeros(slots, np.int32),
            np.zeros(slots, np.float32),
            np.zeros(slots, np.int32),
        )

    def to(self, device: torch.device) -> Packed:
        """Copy to the device, through pinned memory if it is a GPU; integers that index become int64."""
        moved = {}
        for name, array in self.__dict__.items():
            tensor = torch.from_numpy(array)
            if device.type == "cuda":
                tensor = tensor.pin_memory().to(device, non_blocking=True)
            moved[name] = tensor.long() if name in ("tokens", "slots", "targets", "kinds") else tensor
        return Packed(**moved)

    @property
    def positions(self) -> Tensor:
        """Position of every token [S] int64 (tensors only)."""
        within = torch.arange(BLOCK, device=self.number.device)
        return (self.number.long()[:, None] * BLOCK + within).flatten()


def visible(p: Packed) -> Tensor:
    """Block q sees block k: [blocks, blocks] bool."""
    same = (p.query_document[:, None] == p.key_document[None]) | (
        p.query_branch[:, None] == p.key_branch[None]
    )
    seen = same & (p.number[None] < p.number[:, None])
    seen.fill_diagonal_(True)
    return seen


def attention_mask(p: Packed) -> BlockMask | Tensor:
    """The mask of `visible`: a FlexAttention block mask on a GPU, a dense bool mask [S, S] on a CPU."""
    if p.number.is_cuda:
        return block_mask(p)
    return visible(p).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def block_mask(p: Packed) -> BlockMask:
    """The mask of `visible` as lists of tiles, exact: tiles without a visible pair are never touched."""
    seen = visible(p)
    tiles = seen.shape[0] * BLOCK // TILE
    count = seen.view(tiles, TILE // BLOCK, tiles, TILE // BLOCK).sum((1, 3), dtype=torch.int32)
    full = count == (TILE // BLOCK) ** 2
    number, q_doc, q_branch, k_doc, k_branch = (
        p.number,
        p.query_document,
        p.query_branch,
        p.key_document,
        p.key_branch,
    )

    def mask_mod(b, h, q, k):
        i, j = q // BLOCK, k // BLOCK
        same = (q_doc[i] == k_doc[j]) | (q_branch[i] == k_branch[j])
        return (i == j) | (same & (number[j] < number[i]))

    return BlockMask.from_kv_blocks(
        *_tile_lists((count > 0) & ~full),
        *_tile_lists(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(p.tokens.shape[0],) * 2,
    )


def _tile_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of a query tile's chosen key tiles, and their indices first: [1, 1, tiles(, tiles)] int32."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def pack_prompts(
    prompts: list[list[int]], size: int, pad: int
) -> list[tuple[Packed, list[tuple[int, int, int]]]]:
    """Pack the whole blocks of prompts into rows of `size` tokens, for prefill.

    Returns rows, each with the (prompt index, first token in the row, length) of what it holds. Raises
    ValueError if a prompt is longer than a row.
    """
    rows: list[tuple[Packed, list[tuple[int, int, int]]]] = []
    at = size
    for index, prompt in enumerate(prompts):
        length = len(prompt) // BLOCK * BLOCK
        if length > size:
            raise ValueError(f"a prompt of {length} tokens does not fit into a row of {size}")
        if at + length > size:
            rows.append((Packed.empty(size, 1, pad), []))
            at = 0
        row, held = rows[-1]
        row.tokens[at : at + length] = prompt[:length]
        blocks = slice(at // BLOCK, (at + length) // BLOCK)
        row.number[blocks] = np.arange(length // BLOCK)
        row.query_document[blocks] = row.key_document[blocks] = len(held)
        held.append((index, at, length))
        at += length
    return rows

"""Begin new blocks: the tokens of the closed ones are kept aside, every position is masked again."""

from __future__ import annotations

import torch

from herald_kernels.dispatch import implementation
from herald_kernels.ops.checks import need_unit_stride


def open_blocks(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    draft: torch.Tensor,
    closed: torch.Tensor,
    slots: torch.Tensor,
    opening: torch.Tensor,
    mask_id: int,
) -> None:
    """For every r with ``opening[r]``: slot ``slots[r]`` begins a block, in place.

    ``closed`` takes the slot's tokens; its tokens and its draft become ``mask_id``, all of it masked.

    Args:
        tokens: int64 [S, B]; this and the next three with unit stride in the last dimension.
        masked: bool [S, B].
        draft: int64 [S, B].
        closed: int64 [S, B].
        slots: int64 [R], rows of the tables; those with ``opening`` are distinct.
        opening: int64 [R], 1 for a block to open, else 0.
        mask_id: the mask token.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    if not tokens.shape == masked.shape == draft.shape == closed.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, masked {tuple(masked.shape)}, draft {tuple(draft.shape)} and "
            f"closed {tuple(closed.shape)} must have one shape"
        )
    if slots.ndim != 1 or slots.shape != opening.shape:
        raise ValueError(
            f"opening {tuple(opening.shape)} needs one value for each of the slots {tuple(slots.shape)}"
        )
    need_unit_stride(tokens=tokens, masked=masked, draft=draft, closed=closed)
    if slots.numel():
        implementation("open_blocks", tokens.device.type)(
            tokens, masked, draft, closed, slots, opening, mask_id
        )

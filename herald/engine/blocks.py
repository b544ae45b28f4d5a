"""Blocks under way, on the device: what every step reads and commits to, without the host in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from herald.engine.lanes import StepInputs
from herald.engine.request import Request
from herald.sampling_params import SamplingParams
from herald_kernels import open_blocks


class BlockTable:
    """One slot a request, and a last one that padding points to.

    Args:
        block_length: B.
        num_slots: requests that can hold a slot.
        mask_id: token id of a mask.
        device: where the table is.
        windowed: blocks are decoded window by window.

    Attributes:
        rows: int64 [3 S + 1, B]: S rows of tokens, of drafts, of closed blocks, then one of mask ids; S is
            ``num_slots + 1``. A lane reads its tokens from one of them.
        tokens: [S, B], the current block; draft: arg-max tokens where masked, committed ones elsewhere;
            closed: the finished block before the current one. Views of ``rows``.
        masked: bool [S, B], what is still to decode.
        threshold: float32 [S], confidence above which a position is committed, +inf for none.
        edit_threshold: float32 [S], confidence above which a committed token is replaced, +inf for none.
        window: int64 [S, B], the number of each position's window; None unless ``windowed``.
        edits: int64 [S, 3], how far the block of an edited slot is; see `herald_kernels.commit_edits`.
    """

    regions: ClassVar[int] = 3

    def __init__(
        self, block_length: int, num_slots: int, mask_id: int, device: torch.device, windowed: bool = False
    ) -> None:
        slots = num_slots + 1
        self.block_length = block_length
        self.mask_id = mask_id
        self.rows = torch.full(
            (self.regions * slots + 1, block_length), mask_id, dtype=torch.int64, device=device
        )
        self.tokens, self.draft, self.closed = self.rows[:-1].view(self.regions, slots, block_length)[:3]
        self.masked = torch.zeros(slots, block_length, dtype=torch.bool, device=device)
        self.threshold = torch.full((slots,), float("inf"), device=device)
        self.edit_threshold = torch.full_like(self.threshold, float("inf"))
        self.edits = torch.zeros(slots, 3, dtype=torch.int64, device=device)
        self.window = torch.zeros_like(self.tokens) if windowed else None
        self.num_slots = slots
        self._free = list(range(num_slots))[::-1]

    @property
    def spare(self) -> int:
        """The slot that padding points to; nothing of it is masked."""
        return self.num_slots - 1

    def tokens_row(self, slot: int) -> int:
        """Index in ``rows`` of a slot's current block."""
        return slot

    def draft_row(self, slot: int) -> int:
        return self.num_slots + slot

    def closed_row(self, slot: int) -> int:
        return 2 * self.num_slots + slot

    @property
    def masks_row(self) -> int:
        return self.regions * self.num_slots

    def fresh_row(self, slot: int) -> int:
        """Index in ``rows`` of what a slot's next block starts as."""
        return self.masks_row

    def begin(self, request: Request, seed: int) -> None:
        """Give a request a slot that holds its first block.

        Args:
            seed: of the request; here its generator draws, and nothing else is random.
        """
        tokens, masked = first_block(request.prompt_ids, self.block_length, self.mask_id)
        request.slot = self.take(tokens, masked, request.params, request.windows)
        request.left = int(masked.sum())

    def open(self, given: StepInputs) -> None:
        """Begin the next block of the slots that a step opens; part of its work on the device."""
        open_blocks(
            self.tokens, self.masked, self.draft, self.closed, given.slot, given.opening, self.mask_id
        )

    def take(
        self, tokens: np.ndarray, masked: np.ndarray, params: SamplingParams, windows: Sequence[int] = ()
    ) -> int:
        """A free slot that holds a request's first block.

        Args:
            tokens: int64 [B].
            masked: bool [B].
            params: its thresholds are read, and ``max_post_steps``.
            windows: their lengths, where the table is ``windowed``.
        """
        slot = self._free.pop()
        device = self.rows.device
        self.tokens[slot] = to_device(tokens, device)
        self.draft[slot] = self.tokens[slot]
        self.masked[slot] = to_device(masked, device)
        commit, edit = params.confidence_threshold, params.editing_threshold
        assert commit != "auto", "the family's policy settles the options"
        self.threshold[slot] = float("inf") if commit is None else commit
        self.edit_threshold[slot] = float("inf") if edit is None else edit
        if self.window is not None:
            self.window[slot] = to_device(np.repeat(np.arange(len(windows)), windows), device)
        if edit is not None:
            start = np.array([np.count_nonzero(~masked), 0, params.max_post_steps], dtype=np.int64)
            self.edits[slot] = to_device(start, device)
        return slot

    def give_back(self, slot: int) -> None:
        """Its steps under way may still write to it; whoever takes it next comes after them."""
        self._free.append(slot)


def first_block(prompt: list[int], block_length: int, mask_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and masked flags of the first block to decode: the prompt's tail, then masks.

    Returns:
        (int64 [B], bool [B]). A literal mask id in the prompt is not masked: it is the prompt's.
    """
    tail = prompt[len(prompt) // block_length * block_length :]
    tokens = np.full(block_length, mask_id, dtype=np.int64)
    tokens[: len(tail)] = tail
    return tokens, np.arange(block_length) >= len(tail)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host array to the device without waiting for work there."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

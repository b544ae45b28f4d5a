"""`open_blocks`: what a slot is when its next block begins, and that no other slot changes."""

from __future__ import annotations

import pytest
import torch

from herald_kernels import open_blocks
from tests.kernels.support import Draw, Target

MASK = 99


class Tables:
    """Random tables of 12 slots."""

    def __init__(self, target: Target, block_length: int) -> None:
        draw = Draw(target, block_length)
        self.tokens = draw.integers(0, 50, 12, block_length)
        self.masked = draw.integers(0, 2, 12, block_length) > 0
        self.draft = draw.integers(50, 80, 12, block_length)
        self.closed = draw.integers(200, 300, 12, block_length)

    def open(self, slots: list[int], opening: list[int]) -> None:
        device = self.tokens.device
        slot_ids, flags = torch.tensor(slots, device=device), torch.tensor(opening, device=device)
        open_blocks(self.tokens, self.masked, self.draft, self.closed, slot_ids.long(), flags.long(), MASK)

    def rows(self, slot: int) -> list[list[int]]:
        return [table[slot].tolist() for table in (self.tokens, self.masked, self.draft, self.closed)]


@pytest.mark.parametrize("block_length", [1, 4, 5, 32, 64])
def test_opened_slots_begin_and_the_rest_stays(target: Target, block_length: int) -> None:
    tables, before = Tables(target, block_length), Tables(target, block_length)
    # The padding rows share the last slot and open nothing.
    tables.open([7, 0, 3, 5, 11, 11], [1, 0, 1, 0, 0, 0])
    for slot in range(12):
        tokens = before.tokens[slot].tolist()
        masks = [MASK] * block_length
        expected = [masks, [True] * block_length, masks, tokens] if slot in (7, 3) else before.rows(slot)
        assert tables.rows(slot) == expected


def test_columns_of_wider_tables(target: Target) -> None:
    whole, part = Tables(target, 32), Tables(target, 32)
    for name in ("tokens", "masked", "draft", "closed"):
        setattr(part, name, getattr(part, name)[:, 8:24])
    part.open([2], [1])
    assert part.rows(2) == [[MASK] * 16, [True] * 16, [MASK] * 16, whole.tokens[2, 8:24].tolist()]
    assert part.rows(1) == [row[8:24] for row in whole.rows(1)]


def test_no_slots_is_no_work(target: Target) -> None:
    tables, before = Tables(target, 8), Tables(target, 8)
    tables.open([], [])
    assert [tables.rows(slot) for slot in range(12)] == [before.rows(slot) for slot in range(12)]


def test_shapes_that_disagree_are_refused() -> None:
    tables = Tables(Target("cpu", torch.float32, "torch", 0.0, 0), 8)
    with pytest.raises(ValueError, match=r"opening \(1,\).*\(2,\)"):
        tables.open([1, 2], [1])
    tables.closed = tables.closed[:, :7]
    with pytest.raises(ValueError, match=r"closed \(12, 7\)"):
        tables.open([1], [1])

"""Pieces of a prompt: they cover it, and prompts that begin alike are cut alike."""

from __future__ import annotations

import random

import pytest

from herald.engine.prefill_plan import PrefillPlan


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_a_prompt(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([8, 64])
    plan = PrefillPlan.of(rng.randrange(page, 40 * page), page)
    assert plan.step % page == 0 and plan.tail % page == 0 and plan.tail <= plan.step
    prefix = rng.randrange(1, 100 * page)
    first = rng.randrange(prefix // page + 1) * page
    at, lengths, ends = first, [], []
    for start in plan.starts(first, prefix):
        assert start == at
        for begin, end in plan.pieces(start, plan.end(start, prefix)):
            assert begin == at and 0 < end - begin <= plan.step
            whole = range(begin // page, end // page)
            lengths += [end - begin for _ in whole]
            ends += [each == end // page - 1 and end % page == 0 for each in whole]
            at = end
    assert at == prefix
    assert plan.page_pieces(first, prefix, page) == (lengths, ends)
    assert len(lengths) == (prefix - first) // page


def test_prompts_of_nearly_one_length_are_cut_alike() -> None:
    plan = PrefillPlan.of(2048, 64)
    assert (plan.step, plan.tail) == (2048, 512)
    short, long = plan.page_pieces(0, 16_000, 64), plan.page_pieces(0, 16_300, 64)
    alike = [a == b for a, b in zip(*(zip(*each) for each in (short, long)))]
    assert alike.index(False) * 64 == 15_872
    assert plan.starts(0, 0) == plan.starts(0, 5) == [0] and plan.pieces(0, 0) == []

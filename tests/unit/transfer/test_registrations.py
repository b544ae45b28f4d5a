"""Copies are cut where one registration of the pool ends."""

from __future__ import annotations

from itertools import pairwise

import torch

from herald.transfer.cuda import within_registrations


def test_ranges_cover_the_tensor_and_stay_inside() -> None:
    pool = torch.zeros(4096, dtype=torch.bfloat16)
    for begin, end in ((0, 4096), (10, 700), (511, 513), (512, 1024), (3, 3)):
        ranges = within_registrations(pool[begin:end], pool.data_ptr(), size=1024)
        assert ranges[0][0] == 0 and ranges[-1][1] == end - begin
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        for low, high in ranges:
            first, last = (begin + low) * 2, (begin + high) * 2 - 1
            assert high == low or first // 1024 == last // 1024

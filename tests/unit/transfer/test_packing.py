"""Rows gathered by numba, over several threads, and by the extension when it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herald.transfer import packing
from herald.transfer.packing import RowPacker, as_words


@pytest.mark.parametrize(
    ("width", "dtype", "word"),
    [
        (4, torch.float32, np.uint64),
        (3, torch.float32, np.uint32),
        (3, torch.bfloat16, np.uint16),
        (3, torch.uint8, np.uint8),
    ],
)
def test_words_are_as_wide_as_a_row_allows(width: int, dtype: torch.dtype, word: type) -> None:
    rows = torch.zeros(5, width, dtype=dtype)
    words = as_words(rows)
    assert words.dtype == word and words.nbytes == rows.nbytes
    words[2] = np.iinfo(word).max
    assert rows[2].view(torch.uint8).eq(255).all() and rows[[0, 1, 3, 4]].eq(0).all()


@pytest.mark.parametrize("native", [False, True], ids=["numba", "native"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("width", "dtype"), [(8, torch.bfloat16), (5, torch.float16), (7, torch.uint8)])
def test_packer_equals_indexing(
    monkeypatch: pytest.MonkeyPatch, native: bool, threads: int, width: int, dtype: torch.dtype
) -> None:
    if native and packing.native_module() is None:
        pytest.skip("herald._native is not built")
    if not native:
        monkeypatch.setattr(packing, "native_module", lambda: None)
    rng = np.random.default_rng(5)
    src = torch.from_numpy(rng.integers(0, 100, (50, width))).to(dtype)
    packer = RowPacker(src, threads)
    assert packer.name == ("native" if native else "numba")
    for n in (0, 1, 2, 33):
        rows = rng.integers(0, 50, n)
        dst = torch.full((n + 1, width), 111).to(dtype)
        packer.pack(dst, rows)
        assert torch.equal(dst[:n], src[rows])
        assert (dst[n:] == 111).all(), "written past the listed rows"
    packer.close()

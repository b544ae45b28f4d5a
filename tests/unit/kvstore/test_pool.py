"""Row layout and the host pool: sizes, addresses, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herald import hardware
from herald.errors import HostPoolTooSmall, InvalidOption, UsageError
from herald.kvstore import HostPool, RowLayout, choose_page_size

LAYOUT = RowLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


def test_sizes_of_an_8b_model() -> None:
    layout = RowLayout(36, 8, 128, 64, torch.bfloat16)
    assert layout.row_bytes == 512
    assert layout.token_bytes == 147456
    assert layout.page_bytes == 64 * 147456
    assert [layout.pages_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_layout_refuses_nothing_sized(field: str) -> None:
    values = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 4, field: 0}
    with pytest.raises(InvalidOption, match=field):
        RowLayout(**values, dtype=torch.float32)


def test_layout_refuses_other_dtypes() -> None:
    with pytest.raises(InvalidOption, match="torch.bfloat16"):
        RowLayout(1, 1, 8, 4, torch.int8)


def test_page_size_is_whole_blocks() -> None:
    assert [choose_page_size(b) for b in (4, 16, 24, 64, 100)] == [64, 64, 48, 64, 100]
    assert choose_page_size(16, 32) == 32
    with pytest.raises(InvalidOption, match="such as 48"):
        choose_page_size(16, 50)


def test_row_ids_address_the_rows() -> None:
    with HostPool(LAYOUT, num_pages=5, pin=False) as pool:
        assert pool.rows.shape == (3, 5, 2, 4, 16)
        assert pool.num_bytes == 5 * LAYOUT.page_bytes == pool.rows.nbytes
        pool.flat_rows[:, 0] = torch.arange(pool.flat_rows.shape[0])
        pages = np.array([4, 0, 2], dtype=np.int32)
        positions = np.array([[[0, 5, 11], [3, 4, 1]]] * 3, dtype=np.int32)
        layers, heads = np.arange(3)[:, None, None], np.arange(2)[None, :, None]
        ids = pool.row_ids(layers, heads, pages, positions)
        assert ids.dtype == np.int64
        assert ids.shape == positions.shape
        for layer in range(3):
            for head in range(2):
                for i, p in enumerate(positions[layer, head]):
                    row = pool.rows[layer, pages[p // 4], head, p % 4]
                    assert torch.equal(pool.flat_rows[ids[layer, head, i]], row)
                    assert pool.row_ids(layer, head, pages, p) == ids[layer, head, i]


def test_row_ids_are_64_bit() -> None:
    pool = HostPool.__new__(HostPool)
    pool.layout, pool.num_pages = RowLayout(64, 64, 128, 64, torch.bfloat16), 1 << 16
    top = pool.row_ids(63, 63, np.array([(1 << 16) - 1]), 63)
    assert int(top) == 64 * 64 * 64 * (1 << 16) - 1 > 2**31


@pytest.mark.parametrize("position", [-1, 8])
def test_row_ids_refuse_positions_outside(position: int) -> None:
    with HostPool(LAYOUT, num_pages=2, pin=False) as pool, pytest.raises(UsageError, match="0 to 7"):
        pool.row_ids(0, 0, [0, 1], [position])


def test_too_small_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: hardware.MemoryInfo(1 << 30, 0, None, None))
    with pytest.raises(HostPoolTooSmall, match=r"40 tokens .* at most 0 bytes \(192 bytes a token\)"):
        HostPool(LAYOUT, num_pages=10, pin=False)


def test_close_twice() -> None:
    pool = HostPool(LAYOUT, num_pages=1, pin=False)
    pool.close()
    pool.close()
    assert pool.slab.closed


@pytest.mark.parametrize("contiguous", [True, False])
def test_write_block_touches_its_rows_only(contiguous: bool) -> None:
    block = torch.randn(3, 2, 2, 16).bfloat16()
    if not contiguous:
        block = block.transpose(1, 2).contiguous().transpose(1, 2)
    with HostPool(LAYOUT, num_pages=5, pin=False) as pool:
        pool.rows.fill_(7)
        expected = pool.rows.clone()
        expected[:, 3, :, 1:3] = block
        pool.write_block(3, 1, block)
        assert torch.equal(pool.rows, expected)


def test_write_block_refusals() -> None:
    block = torch.zeros(3, 2, 2, 16, dtype=torch.bfloat16)
    with HostPool(LAYOUT, num_pages=5, pin=False) as pool:
        for page, offset in ((5, 0), (-1, 0), (0, 3), (0, -1)):
            with pytest.raises(UsageError, match="rows 0 to 4 of pages 0 to 4"):
                pool.write_block(page, offset, block)
        for wrong in (block[0], block[:2], block.float(), block[..., :8]):
            with pytest.raises(UsageError, match=r"\[3, 2, B, 16\] torch.bfloat16"):
                pool.write_block(0, 0, wrong)

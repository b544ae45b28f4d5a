"""Pages of the pool laid out by position on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herald.errors import UsageError
from herald.kvstore import HostPool, RowLayout
from herald.kvstore.pages import page_runs
from herald.transfer import Transfer, cuda, make_transfer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, SIZE, WIDTH, PAGES = 3, 4, 16, 40


@pytest.fixture
def pool() -> HostPool:
    layout = RowLayout(2, HEADS, WIDTH // 2, SIZE, torch.float32)
    made = HostPool(layout, PAGES, pin=torch.cuda.is_available())
    made.rows.copy_(torch.randn(made.rows.shape))
    return made


def transfer_of(pool: HostPool, device: str) -> Transfer:
    arena = torch.zeros(8, WIDTH, device=device)
    return make_transfer("auto", pool.flat_rows, arena, device, 2)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece_bytes", [1, 3 * HEADS * SIZE * WIDTH * 4, 1 << 20])
@pytest.mark.parametrize("register_bytes", [4096, 1 << 30])
def test_pages_land_by_position(
    pool: HostPool, device: str, piece_bytes: int, register_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs, in pieces and across registrations; what lies behind them is left alone."""
    monkeypatch.setattr(cuda, "LOAD_BYTES", piece_bytes)
    rng = np.random.default_rng(0)
    with transfer_of(pool, device) as transfer:
        if device == "cuda":
            transfer.register_bytes = register_bytes
        for count in (1, 2, 7, 25, PAGES):
            pages = rng.permutation(PAGES)[:count]
            pages[: count // 2].sort()
            layer = torch.full((HEADS, count * SIZE + 3, WIDTH), -1.0, device=device)
            if device == "cuda":
                transfer.delay = lambda: torch.cuda._sleep(500_000)
            runs = [pool.rows[1, int(pages[a]) : int(pages[a]) + b - a] for a, b in page_runs(pages)]
            ticket = transfer.load_pages(runs, layer[:, : count * SIZE])
            assert ticket.bytes == count * HEADS * SIZE * WIDTH * 4
            ticket.wait_device()
            expected = pool.rows[1, pages.tolist()].transpose(0, 1).reshape(HEADS, -1, WIDTH)
            assert torch.equal(layer[:, : count * SIZE].cpu(), expected)
            assert (layer[:, count * SIZE :] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(pool: HostPool, device: str) -> None:
    transfer = transfer_of(pool, device)
    layer = torch.zeros(HEADS, 2 * SIZE, WIDTH, device=device)
    for runs, target in (
        ([pool.rows[0, :3]], layer),
        ([pool.rows[0, :1]], layer),
        ([pool.rows[0, :2]], layer.double()),
        ([pool.rows[0, :2]], layer[1:]),
        ([pool.rows[0, :4:2]], layer),
    ):
        with pytest.raises(UsageError):
            transfer.load_pages(runs, target)
    transfer.close()
    with pytest.raises(UsageError, match="closed"):
        transfer.load_pages([pool.rows[0, :2]], layer)

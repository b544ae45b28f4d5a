"""Operations against each other: what one says must be what another says."""

from __future__ import annotations

import torch

from herald_kernels import copy_rows, prefill_attention, qk_norm_rope, resident_attention, score_rows
from tests.kernels.support import Draw, Target, relative_error


def lane_of_last_block(
    q: torch.Tensor, rows: torch.Tensor, block_length: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last block as a lane whose resident set is every row before it."""
    length = rows.shape[1] - block_length
    device = q.device
    return resident_attention(
        q[None, -block_length:],
        rows[None, :, -block_length:],
        rows,
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((1, rows.shape[0]), length, dtype=torch.int32, device=device),
        torch.full((1,), -1, dtype=torch.int32, device=device),
        scale,
        length,
    )


def test_a_set_of_every_row_is_dense_attention(target: Target) -> None:
    draw = Draw(target, 1)
    q, rows = draw.normal(304, 4, 32), draw.normal(2, 304, 64)
    out, _ = lane_of_last_block(q, rows, 16, 0.2)
    dense = prefill_attention(q[-16:], rows, 288, 16, 0.2)
    assert relative_error(out[0], dense) < target.bound


def test_log_sum_exp_normalises_the_scores(target: Target) -> None:
    draw = Draw(target, 2)
    q, rows = draw.normal(304, 4, 32), draw.normal(2, 304, 64)
    _, lse = lane_of_last_block(q, rows, 16, 0.2)
    shares = score_rows(q[-16:], lse[0], rows, 0.2, "sum").double().exp()
    expected = torch.full((2,), 32.0, dtype=torch.float64, device=target.device)
    assert relative_error(shares.sum(-1), expected) < 1e-5


def test_rows_pass_from_projection_to_arena_to_attention(target: Target) -> None:
    """Rows that the projection wrote serve as a parent's, and as a set's after a copy."""
    draw = Draw(target, 3)
    qkv = draw.normal(16, 8 * 32)
    angle = draw.normal(16, 16).float()
    q = draw.normal(16, 4, 32)
    rows = draw.normal(2, 2, 8, 64)
    qk_norm_rope(qkv, None, None, angle.cos(), angle.sin(), q, rows, 4, 2, 1e-6)
    arena = torch.full((2, 30, 64), float("nan"), device=target.device, dtype=target.dtype)
    slots = torch.arange(3, 11, device=target.device)
    copy_rows(
        arena.view(-1, 64),
        torch.cat([slots, slots + 30]),
        rows[0].reshape(-1, 64),
        torch.arange(16, device=target.device),
    )

    def attend(length: int, parent: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([[0, 0], [length, length]], dtype=torch.int32, device=target.device)
        starts = torch.full((2,), 3, dtype=torch.int64, device=target.device)
        parents = torch.tensor([-1, parent], dtype=torch.int32, device=target.device)
        return resident_attention(q.view(2, 8, 4, 32), rows, arena, starts, lengths, parents, 0.2, 8)

    from_set, from_parent = attend(8, -1), attend(0, 0)
    assert relative_error(from_set[0], from_parent[0]) < target.bound
    assert relative_error(from_set[1], from_parent[1]) < 1e-5

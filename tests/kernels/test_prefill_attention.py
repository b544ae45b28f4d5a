"""`prefill_attention` against one query at a time, and in chunks against itself."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from herald_kernels import prefill_attention
from tests.kernels import naive
from tests.kernels.support import CPU_FP32, CUDA, TORCH, TRITON, Draw, Target, on, relative_error

NAN = float("nan")

CASES = [
    # queries, q_start, rows, block_length, G, KV heads, head_dim
    (1, 0, 1, 4, 1, 2, 16),
    (37, 0, 37, 4, 2, 2, 32),
    (50, 40, 96, 8, 3, 1, 64),
    (33, 64, 97, 32, 4, 1, 128),
    (40, 0, 64, 64, 1, 2, 16),
    (20, 7, 27, 1, 8, 1, 32),
    (45, 10, 90, 1000, 2, 1, 64),
    (64, 200, 300, 5, 1, 2, 128),
    (150, 0, 150, 32, 4, 1, 16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(target: Target, case: tuple[int, int, int, int, int, int, int]) -> None:
    num_queries, q_start, num_rows, block_length, group, kv_heads, head_dim = case
    draw = Draw(target, sum(case))
    q = draw.normal(num_queries, kv_heads * group, head_dim)
    rows = draw.normal(kv_heads, num_rows, 2 * head_dim)
    # Nobody sees what lies behind the end of the last query's block.
    end = (q_start + num_queries - 1) // block_length * block_length + block_length
    rows[:, end:] = NAN
    out = prefill_attention(q, rows, q_start, block_length, head_dim**-0.5)
    assert out.dtype == target.dtype
    expected = naive.prefill_attention(q, rows, q_start, block_length, head_dim**-0.5)
    assert relative_error(out, expected) < target.bound


@pytest.mark.parametrize("descriptors", [True, False])
@on(TRITON)
def test_either_way_of_loading(target: Target, monkeypatch: pytest.MonkeyPatch, descriptors: bool) -> None:
    kernel = "herald_kernels.ops.prefill_attention.triton_kernel"
    shaped = importlib.import_module(kernel).prefill_tiles
    monkeypatch.setattr(
        f"{kernel}.prefill_tiles", lambda *a: dataclasses.replace(shaped(*a), descriptors=descriptors)
    )
    draw = Draw(target, 8)
    # Rows of one layer of a larger tensor, up to the end of the chunk.
    q, rows = draw.normal(40, 8, 64), draw.normal(3, 2, 400, 128)[1, :, :333]
    out = prefill_attention(q, rows, 290, 32, 0.1)
    assert relative_error(out, naive.prefill_attention(q, rows, 290, 32, 0.1)) < target.bound


def dense(q: torch.Tensor, rows: torch.Tensor, block_length: int, scale: float) -> torch.Tensor:
    """Block-causal attention in float64 with one dense mask."""
    group = q.shape[1] // rows.shape[0]
    keys, values = rows.double().repeat_interleave(group, dim=0).chunk(2, dim=-1)
    block = torch.arange(q.shape[0], device=q.device) // block_length
    mask = block[None, :] <= block[:, None]
    query = q.double().transpose(0, 1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).transpose(0, 1)


@on(TORCH + CUDA)
@pytest.mark.parametrize(("block_length", "group"), [(4, 8), (8, 3), (16, 2), (32, 4), (64, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_whole_prompt(target: Target, block_length: int, group: int, head_dim: int) -> None:
    length = {"cuda": 3001, "cpu": 301}[target.device]
    draw = Draw(target, 10 * block_length + group)
    q = draw.normal(length, 2 * group, head_dim)
    rows = draw.normal(2, length, 2 * head_dim)
    out = prefill_attention(q, rows, 0, block_length, 0.11)
    assert relative_error(out, dense(q, rows, block_length, 0.11)) < target.bound


def test_chunks_give_what_one_call_gives(target: Target) -> None:
    draw = Draw(target, 3)
    store = draw.normal(2, 200, 2, 64)
    q, rows = draw.normal(150, 4, 32), store[:, :150, 1]
    whole = prefill_attention(q, rows, 0, 8, 0.2)
    parts = [prefill_attention(q[i : i + 40], rows, i, 8, 0.2) for i in range(0, 150, 40)]
    assert relative_error(torch.cat(parts), whole) < target.bound


def test_bounded_masks_of_the_reference_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(CPU_FP32, 4)
    q, rows = draw.normal(90, 4, 32), draw.normal(2, 100, 64)
    monkeypatch.setattr("herald_kernels.ops.prefill_attention.reference.MASK_ELEMENTS", 1500)
    out = prefill_attention(q, rows, 3, 8, 0.2)
    assert relative_error(out, naive.prefill_attention(q, rows, 3, 8, 0.2)) < CPU_FP32.bound


@on(CUDA)
def test_a_long_prefix(target: Target) -> None:
    draw = Draw(target, 6)
    q, rows = draw.normal(70, 8, 128), draw.normal(2, 40_070, 256)
    out = prefill_attention(q, rows, 40_000, 32, 0.09)
    assert relative_error(out, naive.prefill_attention(q, rows, 40_000, 32, 0.09)) < target.bound


def test_no_queries(target: Target) -> None:
    draw = Draw(target, 5)
    assert prefill_attention(draw.normal(0, 4, 32), draw.normal(2, 9, 64), 3, 4, 0.2).shape == (0, 4, 32)


def test_inputs_that_disagree_are_refused() -> None:
    q, rows = torch.zeros(8, 4, 16), torch.zeros(2, 10, 32)
    with pytest.raises(ValueError, match="at least 11 rows; there are 10"):
        prefill_attention(q, rows, 3, 4, 1.0)
    with pytest.raises(ValueError, match="scale=-1.0 must be positive"):
        prefill_attention(q, rows, 0, 4, -1.0)
    with pytest.raises(ValueError, match="blocks of 0"):
        prefill_attention(q, rows, 0, 0, 1.0)
    with pytest.raises(ValueError, match="does not match rows"):
        prefill_attention(q, rows[..., :30], 0, 4, 1.0)

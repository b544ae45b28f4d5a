"""`resident_attention` against float64, and against itself where two calls must agree."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from herald_kernels import resident_attention
from herald_kernels.ops.resident_attention.splits import Plan
from tests.kernels import naive
from tests.kernels.support import CPU_FP32, CUDA, TRITON, Draw, Target, on, relative_error

NAN = float("nan")
KERNEL = "herald_kernels.ops.resident_attention.triton_kernel"
LONG = -1  # stands for the longest set that a target is given


class Lanes:
    """Random lanes over an arena in which everything outside the resident sets is NaN.

    Args:
        lengths: rows of the set of each lane; lanes of one request are not modelled, each has rows of its
            own.
        parents: parent lane of each lane, -1 for none.
        uneven: let the KV heads of a lane have sets of different lengths.
    """

    def __init__(
        self,
        target: Target,
        block_length: int,
        group: int,
        head_dim: int,
        lengths: list[int],
        parents: list[int] | None = None,
        kv_heads: int = 2,
        uneven: bool = False,
    ) -> None:
        draw = Draw(target, 1000 * block_length + 100 * group + head_dim)
        device, num_lanes = target.device, len(lengths)
        lengths = [target.long if length == LONG else length for length in lengths]
        self.scale = head_dim**-0.5
        self.q = draw.normal(num_lanes, block_length, kv_heads * group, head_dim)
        self.rows = draw.normal(num_lanes, kv_heads, block_length, 2 * head_dim)
        self.length = torch.tensor(lengths, dtype=torch.int32, device=device)[:, None].repeat(1, kv_heads)
        if uneven:
            self.length[:, 1:] //= 2
        self.max_length = max(lengths)
        self.parent = torch.tensor(parents or [-1] * num_lanes, dtype=torch.int32, device=device)
        # A layer of a larger arena, so that its strides are not those of a contiguous tensor.
        arena = torch.full((2, kv_heads, sum(lengths) + 3 * num_lanes + 5, 2 * head_dim), NAN)
        self.arena = arena.to(device, target.dtype)[1]
        starts, start = [], 2
        for lane, length in enumerate(lengths):
            starts.append(start)
            for head in range(kv_heads):
                count = int(self.length[lane, head])
                self.arena[head, start : start + count] = draw.normal(count, 2 * head_dim)
            start += length + 3
        self.row_start = torch.tensor(starts, dtype=torch.int64, device=device)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return resident_attention(
            self.q,
            self.rows,
            self.arena,
            self.row_start,
            self.length,
            self.parent,
            self.scale,
            self.max_length,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return naive.resident_attention(
            self.q, self.rows, self.arena, self.row_start, self.length, self.parent, self.scale
        )

    def only(self, lanes: list[int]) -> Lanes:
        """Some of the lanes, in any order and any number; parents must be among them."""
        part = object.__new__(Lanes)
        part.__dict__.update(self.__dict__)
        for name in ("q", "rows", "row_start", "length"):
            setattr(part, name, getattr(self, name)[lanes].contiguous())
        parents = [lanes.index(parent) if parent in lanes else -1 for parent in self.parent[lanes].tolist()]
        part.parent = torch.tensor(parents, dtype=torch.int32, device=self.parent.device)
        return part


CASES = [
    # B, G, head_dim, lengths, parents, uneven sets
    (4, 1, 16, [0, 1, 77], [-1, 0, -1], False),
    (4, 8, 128, [300, 0], [-1, 0], False),
    (8, 2, 32, [LONG, 513, 1], [-1, 0, 1], True),
    (16, 3, 64, [33, 0, 256, 257], None, False),
    (32, 4, 128, [LONG, 31], [1, -1], False),
    (64, 8, 16, [130], None, True),
    (64, 1, 64, [LONG, 0, 5], [2, 2, -1], True),
    (5, 3, 32, [40, LONG], [-1, 0], False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(
    target: Target, case: tuple[int, int, int, list[int], list[int] | None, bool]
) -> None:
    *shape, uneven = case
    lanes = Lanes(target, *shape, uneven=uneven)
    out, lse = lanes.run()
    expected_out, expected_lse = lanes.expected()
    assert out.dtype == target.dtype and lse.dtype == torch.float32
    assert relative_error(out, expected_out) < target.bound
    assert relative_error(lse, expected_lse) < 1e-5


def test_large_scores_do_not_overflow(target: Target) -> None:
    lanes = Lanes(target, 4, 2, 32, [300, 40], [-1, 0])
    lanes.scale = 40.0
    out, lse = lanes.run()
    expected_out, expected_lse = lanes.expected()
    assert float(expected_lse.max()) > 500
    assert relative_error(lse, expected_lse) < 1e-5
    assert relative_error(out, expected_out) < max(target.bound, 5e-4)


def test_order_of_the_set_does_not_matter(target: Target) -> None:
    lanes = Lanes(target, 8, 2, 32, [400, 90], [-1, 0])
    out, lse = lanes.run()
    draw = Draw(target, 5)
    for lane, length in enumerate([400, 90]):
        start = int(lanes.row_start[lane])
        rows = lanes.arena[:, start : start + length].clone()
        lanes.arena[:, start : start + length] = rows[:, draw.permutation(length)]
    shuffled_out, shuffled_lse = lanes.run()
    assert not torch.equal(lanes.arena[:, start : start + length], rows)
    assert relative_error(shuffled_out, out) < target.bound
    assert relative_error(shuffled_lse, lse) < 1e-5


def test_parent_equals_its_rows_in_the_set(target: Target) -> None:
    lanes = Lanes(target, 8, 2, 32, [100, 300], [-1, 0])
    out, lse = lanes.run()
    start = int(lanes.row_start[1])
    # The set of lane 1 grows by the rows of lane 0 instead.
    lanes.arena = torch.cat([lanes.arena, torch.full_like(lanes.arena[:, :8], NAN)], dim=1)
    lanes.arena[:, start + 300 : start + 308] = lanes.rows[0]
    lanes.length[1], lanes.max_length = 308, 308
    lanes.parent[1] = -1
    merged_out, merged_lse = lanes.run()
    assert relative_error(merged_out[1], out[1]) < target.bound
    assert relative_error(merged_lse, lse) < 1e-5


def test_bits_do_not_depend_on_what_the_lanes_beside_hold(target: Target) -> None:
    lengths = [300, 0, 77, 513, 301, 16]
    lanes = Lanes(target, 8, 2, 32, lengths, [-1, 0, -1, 2, -1, 4])
    out, lse = lanes.run()
    for members in ([5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0], [2, 3, 2, 2, 2, 3]):
        part_out, part_lse = lanes.only(members).run()
        assert torch.equal(part_out, out[members])
        assert torch.equal(part_lse, lse[members])


def cut_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one program take two tiles of a set at most."""
    monkeypatch.setattr(f"{KERNEL}.plan", lambda num_tiles, *_: Plan(2, -(-num_tiles // 2)))


@pytest.mark.parametrize("descriptors", [True, False])
@on(TRITON)
def test_many_pieces_and_descriptors(
    target: Target, monkeypatch: pytest.MonkeyPatch, descriptors: bool
) -> None:
    """Sets of one, some and many pieces in one call; a set may end where a tile or a piece does."""
    cut_finely(monkeypatch)
    shaped = importlib.import_module(KERNEL).resident_tiles
    monkeypatch.setattr(
        f"{KERNEL}.resident_tiles", lambda *a: dataclasses.replace(shaped(*a), descriptors=descriptors)
    )
    lanes = Lanes(target, 16, 4, 64, [0, 1, 31, 32, 33, 64, 128, 517], [-1, 0, -1, 2, -1, 4, -1, 6])
    out, lse = lanes.run()
    expected_out, expected_lse = lanes.expected()
    assert relative_error(out, expected_out) < target.bound
    assert relative_error(lse, expected_lse) < 1e-5


@on(TRITON)
def test_bits_do_not_depend_on_the_place_in_a_cut_call(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_finely(monkeypatch)
    lanes = Lanes(target, 8, 2, 32, [300, 0, 77, 200], [-1, 0, -1, 2])
    out, lse = lanes.run()
    for members in ([3, 2, 1, 0], [1, 0, 1, 0]):
        part_out, part_lse = lanes.only(members).run()
        assert torch.equal(part_out, out[members])
        assert torch.equal(part_lse, lse[members])


@on(TRITON)
def test_near_max_lengths_share_their_bits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(target, 4, 2, 32, [500, 300], None)
    bits = []
    for max_length in (1800, 1900, 2000, 2048):
        lanes.max_length = max_length
        bits.append(lanes.run())
    for out, lse in bits[1:]:
        assert torch.equal(out, bits[0][0])
        assert torch.equal(lse, bits[0][1])


def test_bits_do_not_depend_on_the_place_in_the_arena(target: Target) -> None:
    lanes = Lanes(target, 4, 2, 16, [300])
    out, lse = lanes.run()
    lanes.arena = torch.cat([torch.full_like(lanes.arena[:, :7], NAN), lanes.arena], dim=1)
    lanes.row_start += 7
    moved_out, moved_lse = lanes.run()
    assert torch.equal(moved_out, out)
    assert torch.equal(moved_lse, lse)


def test_strided_queries_and_rows(target: Target) -> None:
    lanes = Lanes(target, 8, 2, 32, [60, 20], [-1, 0])
    out, lse = lanes.run()
    wide_q = torch.full((2, 8, 6, 32), NAN, device=target.device, dtype=target.dtype)
    wide_q[:, :, 1:5] = lanes.q
    wide_rows = torch.full((2, 2, 20, 64), NAN, device=target.device, dtype=target.dtype)
    wide_rows[:, :, 9:17] = lanes.rows
    lanes.q, lanes.rows = wide_q[:, :, 1:5], wide_rows[:, :, 9:17]
    strided_out, strided_lse = lanes.run()
    assert torch.equal(strided_out, out)
    assert torch.equal(strided_lse, lse)


def test_chunks_of_the_reference_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(CPU_FP32, 4, 2, 32, [300, 0, 13], [-1, 0, -1])
    expected_out, expected_lse = lanes.expected()
    monkeypatch.setattr("herald_kernels.ops.resident_attention.reference.CHUNK_ROWS", 64)
    out, lse = lanes.run()
    assert relative_error(out, expected_out) < CPU_FP32.bound
    assert relative_error(lse, expected_lse) < CPU_FP32.bound


def test_no_lanes(target: Target) -> None:
    lanes = Lanes(target, 4, 2, 32, [10]).only([])
    out, lse = lanes.run()
    assert out.shape == (0, 4, 4, 32)
    assert lse.shape == (0, 4, 4)


@on(CUDA)
def test_a_million_rows(target: Target) -> None:
    lanes = Lanes(target, 4, 1, 64, [1 << 20, 5], [1, -1], kv_heads=1)
    out, lse = lanes.run()
    expected_out, expected_lse = lanes.expected()
    assert relative_error(out, expected_out) < target.bound
    assert relative_error(lse, expected_lse) < 1e-5


@on(CUDA[1:])
def test_rows_beyond_two_to_the_31_elements(target: Target) -> None:
    lanes = Lanes(target, 4, 1, 128, [200], kv_heads=2)
    out, lse = lanes.run()
    far = torch.empty(2, 9_000_000, 256, dtype=target.dtype, device=target.device)
    start = far.shape[1] - 200
    first = int(lanes.row_start[0])
    far[:, start:] = lanes.arena[:, first : first + 200]
    lanes.arena, lanes.row_start = far, torch.tensor([start], device=target.device)
    far_out, far_lse = lanes.run()
    assert torch.equal(far_out, out)
    assert torch.equal(far_lse, lse)


def test_inputs_that_disagree_are_refused() -> None:
    lanes = Lanes(CPU_FP32, 4, 2, 16, [10, 20])
    lanes.scale = 0.0
    with pytest.raises(ValueError, match=r"scale=0.0 must be positive"):
        lanes.run()
    lanes = Lanes(CPU_FP32, 4, 2, 16, [10, 20])
    lanes.max_length = 19
    with pytest.raises(ValueError, match=r"max_length=19.*20"):
        lanes.run()
    lanes = Lanes(CPU_FP32, 4, 2, 16, [10, 20])
    lanes.arena = lanes.arena.bfloat16()
    with pytest.raises(ValueError, match=r"torch.bfloat16 does not match"):
        lanes.run()
    lanes.length = lanes.length[:1]
    lanes.arena = lanes.arena.float()
    with pytest.raises(ValueError, match="2 lanes of 2 KV heads"):
        lanes.run()
    lanes.rows = lanes.rows[:, :, :3]
    with pytest.raises(ValueError, match="does not match rows"):
        lanes.run()

"""`resident_attention` and `prefill_attention` beside torch's own attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench_longctx.kernels.timing import Call, Figure, Limits, figure, num_buffers, seconds_each
from herald_kernels import prefill_attention, resident_attention
from herald_kernels.ops.prefill_attention import reference as prefill_reference
from herald_kernels.ops.resident_attention import reference as resident_reference


@dataclass(frozen=True)
class Heads:
    """The attention of a model: query heads, KV heads, head_dim, block length."""

    query: int
    kv: int
    dim: int
    block: int


SDAR_8B = Heads(32, 8, 128, 32)
TINY = Heads(4, 2, 32, 8)


@dataclass(frozen=True)
class Resident:
    """Lanes of one call.

    Args:
        lanes: in all; ``shared`` of them at a time attend to one request's set, each but the first a child of
            the one before it.
        rows: of every set.
        max_length: bucket that the call is made for; 0 for ``rows``.
    """

    lanes: int
    rows: int
    shared: int = 1
    max_length: int = 0

    def __str__(self) -> str:
        shared = f", {self.shared} a request" if self.shared > 1 else ""
        return f"{self.lanes} lanes x {self.rows} rows{shared}"


RESIDENT = (
    Resident(1, 1638),
    Resident(2, 1638, 2),
    Resident(4, 1638),
    Resident(16, 1638),
    Resident(16, 1638, 2),
    Resident(16, 1638, max_length=2048),
    Resident(24, 1638, 3),
    Resident(40, 1638, 2),
    Resident(1, 6553),
    Resident(4, 6553),
    Resident(16, 6553),
    Resident(1, 32_768),
    Resident(2, 32_768, 2),
    Resident(8, 32_768),
    Resident(1, 131_072),
    Resident(4, 131_072),
)
TINY_RESIDENT = (Resident(1, 70), Resident(4, 133, 2), Resident(3, 300, max_length=320))
# Queries of a chunk, rows in all.
PREFILL = ((4096, 4096), (2048, 32_768), (4096, 32_768), (2048, 131_072), (4096, 131_072))
TINY_PREFILL = ((48, 48), (40, 100))


class ResidentInput:
    """Random input of `resident_attention` in as many copies of the set as keep the L2 cache cold."""

    def __init__(self, heads: Heads, case: Resident, device: str, dtype: torch.dtype) -> None:
        self.heads, self.case = heads, case
        requests = -(-case.lanes // case.shared)
        arena_shape = (heads.kv, requests * case.rows, 2 * heads.dim)
        self.set_bytes = heads.kv * requests * case.rows * 2 * heads.dim * dtype.itemsize
        buffers = num_buffers(self.set_bytes) if device == "cuda" else 1
        self.arenas = [torch.randn(arena_shape, device=device, dtype=dtype) for _ in range(buffers)]
        self.q = torch.randn(case.lanes, heads.block, heads.query, heads.dim, device=device, dtype=dtype)
        self.rows = torch.randn(case.lanes, heads.kv, heads.block, 2 * heads.dim, device=device, dtype=dtype)
        lane = torch.arange(case.lanes, device=device)
        self.row_start = lane // case.shared * case.rows
        self.length = torch.full((case.lanes, heads.kv), case.rows, dtype=torch.int32, device=device)
        self.parent = torch.where(lane % case.shared > 0, lane - 1, -1).to(torch.int32)
        self.scale = heads.dim**-0.5

    @property
    def large(self) -> bool:
        """One copy is enough to fill a graph."""
        return self.set_bytes >= 1 << 29

    def arguments(self, buffer: int) -> tuple[Any, ...]:
        """Of the operation, on one of the copies."""
        return (
            self.q,
            self.rows,
            self.arenas[buffer],
            self.row_start,
            self.length,
            self.parent,
            self.scale,
            self.case.max_length or self.case.rows,
        )

    def calls(self) -> list[Call]:
        """Calls of the operation over all copies, at least eight."""
        count = len(self.arenas)
        order = range(count) if self.large else [i % count for i in range(max(8, count))]
        return [partial(resident_attention, *self.arguments(i)) for i in order]

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read."""
        return self.set_bytes + self.q.nbytes * 2 + self.rows.nbytes

    @property
    def flop(self) -> int:
        """Of the two products."""
        heads, case = self.heads, self.case
        return 4 * case.lanes * heads.query * heads.block * heads.dim * (case.rows + heads.block)

    def sdpa_calls(self) -> list[Call]:
        """torch's attention to the sets alone; the copies of keys and values it needs are not timed."""
        heads, case = self.heads, self.case
        group = heads.query // heads.kv
        query = self.q.unflatten(2, (heads.kv, group)).permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
        split = []
        for arena in self.arenas:
            sets = arena.unflatten(1, (-1, case.rows)).transpose(0, 1)
            sets = sets.repeat_interleave(case.shared, 0)[: case.lanes]
            split.append([part.contiguous() for part in sets.split(heads.dim, -1)])
        return [partial(scaled_dot_product_attention, query, *kv, scale=self.scale) for kv in split]


def check(device: str) -> None:
    """The kernels against their references on small shapes.

    Raises:
        AssertionError: they differ by more than their dtype explains.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, cases = (
        (SDAR_8B, (Resident(3, 300), Resident(4, 1638, 2))) if device == "cuda" else (TINY, TINY_RESIDENT)
    )
    bound = 8e-3 if dtype == torch.bfloat16 else 2e-6
    for case in cases:
        given = ResidentInput(heads, case, device, dtype)
        out, lse = resident_attention(*given.arguments(0))
        expected, expected_lse = resident_reference.resident_attention(*given.arguments(0))
        assert_close(out, expected, bound, f"resident_attention, {case}")
        assert_close(lse, expected_lse, 1e-5, f"resident_attention lse, {case}")
    for queries, num_rows in TINY_PREFILL if device == "cpu" else ((300, 1000),):
        q, rows = prefill_input(heads, queries, num_rows, device, dtype)
        arguments = (q, rows, num_rows - queries, heads.block, heads.dim**-0.5)
        expected = prefill_reference.prefill_attention(*arguments)
        assert_close(prefill_attention(*arguments), expected, bound, f"prefill_attention, {queries}")


def assert_close(out: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    """Bound ||out - expected|| / ||expected||."""
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    assert error < bound, f"{what}: relative error {error:.2e} exceeds {bound:.0e}"


def prefill_input(
    heads: Heads, queries: int, num_rows: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of a chunk and rows of a layer."""
    q = torch.randn(queries, heads.query, heads.dim, device=device, dtype=dtype)
    return q, torch.randn(heads.kv, num_rows, 2 * heads.dim, device=device, dtype=dtype)


def prefill_flop(heads: Heads, queries: int, num_rows: int) -> float:
    """Of the two products over what a block-causal chunk at the end of ``num_rows`` sees."""
    return 4 * heads.query * heads.dim * queries * (num_rows - queries / 2 + heads.block / 2)


def resident_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Times of `resident_attention` and of torch's attention to the same sets."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for case in TINY_RESIDENT if tiny else RESIDENT:
        given = ResidentInput(TINY if tiny else SDAR_8B, case, device, dtype)
        for name, calls in (("resident_attention", given.calls()), ("sdpa", given.sdpa_calls())):
            yield figure(
                "attention", name, str(case), seconds_each(calls), given.num_bytes, given.flop, limits
            )


def prefill_figures(device: str, tiny: bool, limits: Limits) -> Iterator[Figure]:
    """Times of `prefill_attention`, and of causal torch attention where the chunk is the whole prompt."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = TINY if tiny else SDAR_8B
    for queries, num_rows in TINY_PREFILL if tiny else PREFILL:
        q, rows = prefill_input(heads, queries, num_rows, device, dtype)
        start, scale = num_rows - queries, heads.dim**-0.5
        flop = prefill_flop(heads, queries, num_rows)
        num_bytes = rows.nbytes + 2 * q.nbytes
        shape = f"{queries} queries, {num_rows} rows"
        seconds = seconds_each([partial(prefill_attention, q, rows, start, heads.block, scale)] * 2)
        yield figure("prefill", "prefill_attention", shape, seconds, num_bytes, flop, limits)
        if start == 0:
            query = q.transpose(0, 1)[None].contiguous()
            keys, values = (part.contiguous() for part in rows[None].split(heads.dim, -1))
            causal = partial(
                scaled_dot_product_attention, query, keys, values, is_causal=True, enable_gqa=True
            )
            seconds = seconds_each([causal] * 2)
            yield figure("prefill", "sdpa, causal", shape, seconds, num_bytes, flop, limits)

"""Every operation of a step inside a CUDA graph: replayed on new values, it gives what a plain call gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

import herald_kernels as kernels
from tests.kernels.support import CUDA, Draw, Target, on

NUM_LANES, BLOCK, HEADS, KV_HEADS, DIM, SET_ROWS = 4, 32, 8, 2, 128, 900


class Inputs:
    """Static tensors of one small step, refilled in place."""

    def __init__(self, target: Target) -> None:
        self.device = target.device
        tokens = NUM_LANES * BLOCK

        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=target.device, dtype=target.dtype)

        def ids(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=target.device, dtype=torch.int64)

        self.hidden, self.weight, self.head_weight = new(tokens, 512), new(512), new(DIM)
        self.qkv = new(tokens, (HEADS + 2 * KV_HEADS) * DIM)
        self.cos, self.sin = new(tokens, DIM // 2).float(), new(tokens, DIM // 2).float()
        self.q, self.rows = new(tokens, HEADS, DIM), new(NUM_LANES, KV_HEADS, BLOCK, 2 * DIM)
        self.arena = new(KV_HEADS, NUM_LANES * SET_ROWS, 2 * DIM)
        self.length, self.parent = ids(NUM_LANES, KV_HEADS).int(), ids(NUM_LANES).int()
        self.row_start, self.slots, self.opening = ids(NUM_LANES), ids(NUM_LANES), ids(NUM_LANES)
        self.quota, self.dst_rows = ids(NUM_LANES), ids(50)
        self.logits = new(tokens, 20_000)
        self.tokens, self.draft, self.closed = ids(9, BLOCK), ids(9, BLOCK), ids(9, BLOCK)
        self.window = ids(9, BLOCK)
        self.masked = torch.zeros(9, BLOCK, dtype=torch.bool, device=target.device)
        self.threshold = torch.full((9,), 1e-4, device=target.device)
        self.router, self.expert_ids = new(64, 512), ids(tokens, 8).int()
        self.expert_weights = new(tokens, 8).float()
        self.gate_up, self.down = new(64, 256, 512), new(64, 512, 128)
        self.edits, self.edit_threshold = ids(9, 3), torch.full((9,), 1e-5, device=target.device)

    def fill(self, target: Target, seed: int) -> None:
        """Other values, at the same addresses."""
        draw = Draw(target, seed)
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
                tensor.copy_(draw.normal(*tensor.shape))
        self.weight.copy_(draw.normal(512))
        self.head_weight.copy_(draw.normal(DIM))
        self.length.copy_(draw.integers(0, SET_ROWS + 1, NUM_LANES, 1))
        self.parent.copy_(torch.arange(NUM_LANES) - 1)
        self.row_start.copy_(draw.permutation(NUM_LANES) * SET_ROWS)
        self.slots.copy_(draw.permutation(8)[:NUM_LANES])
        self.opening.copy_(draw.integers(0, 2, NUM_LANES))
        self.quota.copy_(draw.integers(1, 6, NUM_LANES))
        self.dst_rows.copy_(draw.permutation(60)[:50]).masked_fill_(draw.integers(0, 3, 50) == 0, -1)
        self.tokens.copy_(draw.integers(0, 100, 9, BLOCK))
        self.window.copy_(draw.integers(0, 2, 9, BLOCK).cumsum(1))
        self.masked.copy_(draw.integers(0, 2, 9, BLOCK) > 0)
        self.masked[8] = False
        self.gate_up /= 512**0.5
        self.expert_ids.copy_(draw.integers(0, 64, *self.expert_ids.shape)).masked_fill_(
            draw.integers(0, 3, *self.expert_ids.shape) == 0, 5
        )
        self.edits.copy_(draw.integers(0, 4, 9, 3))

    def step(self) -> list[torch.Tensor]:
        """All operations, each at least once; what they return and what they changed."""
        normed = kernels.rms_norm(self.hidden, self.weight, 1e-6)
        gated = kernels.silu_mul(normed)
        kernels.qk_norm_rope(
            *(self.qkv, self.head_weight, self.head_weight, self.cos, self.sin, self.q, self.rows),
            *(HEADS, KV_HEADS, 1e-6),
        )
        out, lse = kernels.resident_attention(
            *(self.q.view(NUM_LANES, BLOCK, HEADS, DIM), self.rows, self.arena, self.row_start),
            *(self.length, self.parent, DIM**-0.5, SET_ROWS),
        )
        scores = kernels.score_rows(self.q[:BLOCK], lse[0], self.arena, DIM**-0.5, "max")
        chunk = kernels.prefill_attention(self.q, self.arena, 64, BLOCK, DIM**-0.5)
        best, confidence = kernels.greedy_confidence(self.logits)
        best, confidence = best.view(NUM_LANES, BLOCK), confidence.view(NUM_LANES, BLOCK)
        tables = self.tokens, self.masked, self.draft
        kernels.open_blocks(*tables, self.closed, self.slots, self.opening, 7)
        report = kernels.commit(
            *(*tables, self.slots, best, best, confidence, self.quota, self.threshold), self.window
        )
        edited = kernels.commit_edits(
            *(*tables, self.edits, self.edit_threshold, self.slots, self.opening, best, best, confidence),
            *(self.quota, self.threshold, 7),
        )
        experts, shares = kernels.route_experts(
            normed, self.router, None, 8, score="sigmoid", num_groups=8, top_groups=4
        )
        mixed = self.hidden.clone()
        kernels.expert_mlp(normed, self.expert_ids, self.expert_weights, self.gate_up, self.down, mixed)
        copied = torch.zeros_like(self.arena[0, :60])
        kernels.copy_rows(copied, self.dst_rows, self.arena[0], None)
        written = [
            edited,
            experts,
            shares,
            mixed,
            self.edits,
            self.q,
            self.rows,
            self.tokens,
            self.masked,
            self.draft,
            self.closed,
        ]
        results = [normed, gated, out, lse, scores, chunk, best, confidence, report, copied, *written]
        return [result.clone() for result in results]


def record(call: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of ``call`` and the tensors it fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    return graph, results


@on(CUDA)
def test_a_replayed_step_is_a_plain_step(target: Target) -> None:
    inputs = Inputs(target)
    inputs.fill(target, 0)
    graph, recorded = record(inputs.step)
    for seed in (1, 2, 3):
        inputs.fill(target, seed)
        expected = inputs.step()
        inputs.fill(target, seed)
        graph.replay()
        torch.cuda.synchronize()
        for given, plain in zip(recorded, expected, strict=True):
            assert torch.equal(given, plain)
            assert not (plain.is_floating_point() and plain.isnan().any())

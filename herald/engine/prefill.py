"""Layer-major prefill: every prompt position passes layer l before any passes layer l+1.

One layer's KV is on the device at a time, beside copies of at most three layers on their way to the host,
so peak memory does not grow with the number of layers. The work is a list of (layer, chunk) units that
a scheduler can spread over steps. The lane of the first block to decode runs along: while a layer's
whole KV is there its queries choose the first resident set, exactly, and its logits are step 0 of the
first block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from herald.engine.resident import ResidentSet
from herald.engine.runner import LaneRunner
from herald.transfer import Ticket
from herald_kernels import prefill_attention, resident_attention, score_rows

# Log-sum-exp given to queries of known positions: no row gets a score from them.
NO_VOTE = 1e30

StoreLayer = Callable[[int, torch.Tensor], Ticket]
# (q [B, heads, head_dim], lse [B, heads], rows [kv_heads, n, 2 * head_dim], scale, span that is chosen from)
# -> float32 [kv_heads, n]; see `herald_kernels.score_rows`.
FirstScores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, tuple[int, int]], torch.Tensor]


def scores_by(operator: str) -> FirstScores:
    """Exact scores of all rows, by an operator of `OffloadConfig`."""

    def scores(
        q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
    ) -> torch.Tensor:
        return score_rows(q, lse, rows, scale, operator)

    return scores


class PrefillTask:
    """Prefill of one request.

    Args:
        runner: gives the model and its projections.
        resident: the request's set, filled layer by layer.
        prefix_tokens: int64 [n] on the device, whole blocks of the prompt.
        block_tokens: int64 [B], the first block to decode: prompt tail, then mask ids.
        masked: bool [B], positions of it to decode; only their queries choose rows.
        chunk: positions of a unit, rounded down to whole blocks.
        store_layer: called with (layer, rows [kv_heads, n, 2 * head_dim]) when a layer's KV is whole;
            copies it to the host and returns the copy's ticket. None without offload.
        scores: of the rows of a layer, by which the first set is chosen.
    """

    def __init__(
        self,
        runner: LaneRunner,
        resident: ResidentSet,
        prefix_tokens: torch.Tensor,
        block_tokens: torch.Tensor,
        masked: torch.Tensor,
        chunk: int,
        store_layer: StoreLayer | None,
        scores: FirstScores,
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.resident = resident
        self.masked = masked
        self.scores = scores
        self.store_layer = store_layer
        self.prefix = prefix_tokens.numel()
        self.block_length = block_tokens.numel()
        self.step = max(chunk // self.block_length, 1) * self.block_length
        self.starts = list(range(0, self.prefix, self.step)) or [0]
        self.layer = 0
        self.chunk = 0
        self.logits: torch.Tensor | None = None

        model, device = self.model, self.model.device
        self._hidden = model.embed(prefix_tokens)
        self._lane_hidden = model.embed(block_tokens)
        positions = torch.arange(self.prefix + self.block_length, device=device)
        self._rope = model.rope(positions)
        shape = (model.config.num_kv_heads, self.prefix, 2 * model.config.head_dim)
        self._rows = None if store_layer is None else torch.empty(shape, dtype=model.dtype, device=device)
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_parent = torch.full((1,), -1, dtype=torch.int32, device=device)
        self._length = torch.full((1, shape[0]), self.prefix, dtype=torch.int32, device=device)
        self._stored: list[Ticket] = []

    @property
    def done(self) -> bool:
        """Every layer has seen every position."""
        return self.layer == self.model.config.num_layers

    @property
    def progress(self) -> int:
        """Tokens x layers that are done."""
        within = self.starts[self.chunk] if self.chunk else 0
        return self.layer * self.prefix + within

    def run_unit(self) -> None:
        """Run one (layer, chunk) unit; the last of a layer also runs the first block's lane."""
        rows = self.resident.layer_view(self.layer) if self._rows is None else self._rows
        start = self.starts[self.chunk]
        end = min(start + self.step, self.prefix)
        if end > start:  # a prompt shorter than a block has nothing to prefill but its lane
            hidden = self._hidden[start:end]
            cos, sin = (part[start:end] for part in self._rope)
            q = self.runner.project(self.layer, hidden, cos, sin, rows[:, start:end].unsqueeze(0))
            out = prefill_attention(q, rows[:, :end], start, self.block_length, self.model.softmax_scale)
            hidden.copy_(self.model.finish_layer(self.layer, hidden, out.reshape(end - start, -1)))
        self.chunk += 1
        if self.chunk == len(self.starts):
            self._finish_layer(rows[:, : self.prefix])

    def _finish_layer(self, rows: torch.Tensor) -> None:
        """Run the first block's lane through the layer, choose its rows, send the KV away."""
        cos, sin = (part[self.prefix :] for part in self._rope)
        lane_rows = self.runner.new_rows(1, self.block_length)
        q = self.runner.project(self.layer, self._lane_hidden, cos, sin, lane_rows)
        out, lse = resident_attention(
            q.unsqueeze(0),
            lane_rows,
            rows,
            self._zero,
            self._length,
            self._no_parent,
            self.model.softmax_scale,
            self.prefix,
        )
        attn = out.reshape(self.block_length, -1)
        self._lane_hidden = self.model.finish_layer(self.layer, self._lane_hidden, attn)
        if self.store_layer is not None and self.prefix:
            self.resident.fill(self.layer, rows, self._choose(q, lse[0], rows), self.prefix)
            if len(self._stored) > 1:
                self._stored[-2].wait_host()
            self._stored.append(self.store_layer(self.layer, rows))
        self.layer += 1
        self.chunk = 0
        if self.done:
            if self.store_layer is None:
                self.resident.mark_dense(self.prefix)
            self.logits = self.model.logits(self._lane_hidden)

    def _choose(self, q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Exact first selection of a layer: int64 [kv_heads, T(n)], ascending.

        Args:
            q: [B, heads, head_dim]. lse: [B, heads]. rows: [kv_heads, n, 2 * head_dim].
        """
        resident = self.resident
        size = resident.size_for(self.prefix)
        if size == self.prefix:
            everything = torch.arange(self.prefix, device=rows.device)
            return everything.expand(rows.shape[0], -1)
        first, last, _ = resident.candidates(self.prefix)
        scale = self.model.softmax_scale
        asking = lse.masked_fill(~self.masked.unsqueeze(1), NO_VOTE)
        scores = self.scores(q, asking, rows, scale, (first, last))
        scores[:, :first] = float("inf")
        scores[:, last:] = float("inf")
        return torch.topk(scores, size, dim=1, sorted=False).indices.sort(dim=1).values


def first_block(prompt: list[int], block_length: int, mask_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and masked flags of the first block to decode: the prompt's tail, then masks.

    Returns:
        (int64 [B], bool [B]). A literal mask id in the prompt is not masked: it is the prompt's.
    """
    tail = prompt[len(prompt) // block_length * block_length :]
    tokens = np.full(block_length, mask_id, dtype=np.int64)
    tokens[: len(tail)] = tail
    return tokens, np.arange(block_length) >= len(tail)

"""Cached steps: the windows of some requests through the model, against the rows that each of them keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from herald.engine.program import record_graph
from herald.engine.runner import LaneRunner, recording_stream
from herald_kernels import resident_attention


class WindowShape(NamedTuple):
    """What a step's work on the device depends on.

    Attributes:
        lanes: requests.
        window: positions of each.
        block_length: of them, from the first on, those that are decoded.
        max_length: at least the rows that each keeps, a power of two.
        captures: queries and log-sum-exps of the block are kept.
        recorded: run as a CUDA graph.
    """

    lanes: int
    window: int
    block_length: int
    max_length: int
    captures: bool
    recorded: bool


class WindowStep:
    """The forward of one shape.

    Args:
        runner: gives model and arena.
        shape: of the step.
        pool: handle of the memory that recordings share.

    Attributes:
        hidden: [lanes, block_length, hidden_size] after a run, of the rows that predict the block. Logits are
            made of it outside a recording: they are large, and every recording would keep its own.
        queries, lse: [layers, lanes, block_length, heads, head_dim] and float32 [..., heads], where captured.
    """

    def __init__(self, runner: LaneRunner, shape: WindowShape, pool: Any) -> None:
        self.runner = runner
        self.shape = shape
        config, device = runner.model.config, runner.model.device
        window = (shape.lanes, shape.window)
        self._tokens = torch.full(window, config.mask_token_id, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(3 * shape.lanes, dtype=torch.int64, device=device)
        self._offsets = torch.arange(shape.window, device=device)
        # A shifted family predicts a position from the row before it. The row before the block is not in the
        # window; its first position is never masked here, so any row will do.
        predicting = self._offsets[: shape.block_length] - int(config.shifted)
        self._predicting = predicting.clamp(min=0)
        self._no_parent = torch.full((shape.lanes,), -1, dtype=torch.int32, device=device)
        self.hidden: torch.Tensor | None = None
        self.queries: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if shape.recorded:
            self._graph = record_graph(self._run, pool, recording_stream(device))

    def run(self, tokens: torch.Tensor, numbers: torch.Tensor) -> None:
        """One step on the current stream.

        Args:
            tokens: int64 [lanes, window] on the device.
            numbers: int64 [3 * lanes] in (page-locked) host memory: first position of each window, first
                arena row and count of the rows that it sees; unchanged until the step is done.
        """
        self._tokens.copy_(tokens)
        self._numbers.copy_(numbers, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def _run(self) -> None:
        runner, shape = self.runner, self.shape
        model, config = runner.model, runner.model.config
        position, row_start, length = self._numbers.split(shape.lanes)
        lengths = length.to(torch.int32).unsqueeze(1).repeat(1, config.num_kv_heads)
        hidden = model.embed(self._tokens.view(-1))
        cos, sin = model.rope((position.unsqueeze(1) + self._offsets).view(-1))
        queries, sums = [], []
        for layer in range(config.num_layers):
            rows = runner.new_rows(shape.lanes, shape.window)
            q = runner.project(layer, hidden, cos, sin, rows)
            q = q.view(shape.lanes, shape.window, config.num_heads, config.head_dim)
            out, lse = resident_attention(
                q,
                rows,
                runner.arena.rows[layer],
                row_start,
                lengths,
                self._no_parent,
                model.softmax_scale,
                shape.max_length,
            )
            hidden = model.finish_layer(layer, hidden, out.view(hidden.shape[0], -1))
            if shape.captures:
                queries.append(q[:, : shape.block_length])
                sums.append(lse[:, : shape.block_length])
        if shape.captures:
            self.queries, self.lse = torch.stack(queries), torch.stack(sums)
        self.hidden = hidden.view(shape.lanes, shape.window, -1).index_select(1, self._predicting)

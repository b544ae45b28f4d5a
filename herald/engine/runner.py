"""Runs lanes through the model: the device work of a step, and nothing of its policy."""

from __future__ import annotations

import torch

from herald.engine.arena import DeviceArena
from herald.engine.lanes import Capture, ForwardResult, Lane, LaneTensors
from herald.models import BlockModel
from herald_kernels import qk_norm_rope, resident_attention


class LaneRunner:
    """Forwards over lanes.

    Args:
        model: the model whose layers run.
        arena: holds the resident sets that the lanes attend to.
    """

    def __init__(self, model: BlockModel, arena: DeviceArena) -> None:
        self.model = model
        self.arena = arena

    def forward(self, lanes: list[Lane]) -> ForwardResult:
        """One forward over ``lanes``, all of the same block length.

        Returns:
            Logits, final rows and captured queries of the lanes that asked for them.
        """
        config = self.model.config
        batch = LaneTensors.build(lanes, config.num_kv_heads, self.model.device)
        shape = (len(lanes), lanes[0].tokens.numel())
        finals = [i for i, lane in enumerate(lanes) if lane.final]
        captured = [i for i, lane in enumerate(lanes) if lane.capture]
        final_rows: dict[int, list[torch.Tensor]] = {i: [] for i in finals}
        queries: dict[int, list[torch.Tensor]] = {i: [] for i in captured}
        lses: dict[int, list[torch.Tensor]] = {i: [] for i in captured}

        cos, sin = self.model.rope(batch.positions)
        hidden = self.model.embed(batch.tokens)
        for layer in range(config.num_layers):
            rows = self.new_rows(*shape)
            q = self.project(layer, hidden, cos, sin, rows).view(*shape, config.num_heads, config.head_dim)
            out, lse = resident_attention(
                q,
                rows,
                self.arena.rows[layer],
                batch.row_start,
                batch.length,
                batch.parent,
                self.model.softmax_scale,
                batch.max_length,
            )
            hidden = self.model.finish_layer(layer, hidden, out.reshape(hidden.shape[0], -1))
            for i in finals:
                final_rows[i].append(rows[i])
            for i in captured:
                queries[i].append(q[i])
                lses[i].append(lse[i])

        result = ForwardResult()
        wanted = [i for i, lane in enumerate(lanes) if lane.logits]
        if wanted:
            by_lane = hidden.view(*shape, -1)
            logits = self.model.logits(by_lane[wanted].reshape(len(wanted) * shape[1], -1))
            result.logits = dict(zip(wanted, logits.view(len(wanted), shape[1], -1), strict=True))
        result.final_rows = {i: torch.stack(rows) for i, rows in final_rows.items()}
        for i in captured:
            result.captures[i] = to_host(torch.stack(queries[i]), torch.stack(lses[i]))
        return result

    def new_rows(self, num_lanes: int, block_length: int) -> torch.Tensor:
        """Unwritten rows of lanes in one layer: ``[num_lanes, kv_heads, block_length, 2 * head_dim]``."""
        config = self.model.config
        shape = (num_lanes, config.num_kv_heads, block_length, 2 * config.head_dim)
        return torch.empty(shape, dtype=self.model.dtype, device=self.model.device)

    def project(
        self, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Queries ``[T, heads, head_dim]`` of a layer, normed and rotated; K and V go to ``rows``.

        Args:
            hidden: [T, hidden_size].
            cos, sin: [T, head_dim / 2] float32.
            rows: [N, kv_heads, B, 2 * head_dim] with N * B = T, written.
        """
        config = self.model.config
        qkv = self.model.qkv(layer, hidden)
        q = qkv.new_empty(hidden.shape[0], config.num_heads, config.head_dim)
        q_weight, k_weight = self.model.qk_norm_weights(layer)
        qk_norm_rope(
            qkv,
            q_weight,
            k_weight,
            cos,
            sin,
            q,
            rows,
            config.num_heads,
            config.num_kv_heads,
            config.rms_norm_eps,
        )
        return q


def to_host(queries: torch.Tensor, lse: torch.Tensor) -> Capture:
    """Copy captured queries to host memory as float32, without waiting for them."""
    if queries.device.type == "cpu":
        return Capture(queries.float(), lse.float(), None)
    host_queries = torch.empty(queries.shape, dtype=torch.float32, pin_memory=True)
    host_lse = torch.empty(lse.shape, dtype=torch.float32, pin_memory=True)
    host_queries.copy_(queries.float(), non_blocking=True)
    host_lse.copy_(lse.float(), non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Capture(host_queries, host_lse, ready)

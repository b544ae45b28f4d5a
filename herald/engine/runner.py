"""Runs lanes through the model: the device work of a step, and nothing of its policy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from herald.cuda_driver import exclusive_stream
from herald.engine.arena import DeviceArena
from herald.engine.blocks import BlockTable
from herald.engine.lanes import StepShape
from herald.engine.program import StepProgram
from herald.models import BlockModel
from herald_kernels import qk_norm_rope


def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a process that records graphs of steps on a device."""
    return exclusive_stream(device, "steps")


class LaneRunner:
    """Projections of any positions, and the programs of steps.

    Args:
        model: the model whose layers run.
        arena: holds the resident sets that lanes attend to.
        windows: holds what lanes attend to in layers with a window, None without such layers.
        use_graphs: record every program as a CUDA graph and replay it; False runs it kernel by kernel.
    """

    def __init__(
        self,
        model: BlockModel,
        arena: DeviceArena,
        use_graphs: bool = True,
        windows: DeviceArena | None = None,
    ) -> None:
        self.model = model
        self.arena = arena
        self.windows = windows
        self.use_graphs = use_graphs and model.device.type == "cuda"
        self._programs: dict[tuple[int, StepShape], StepProgram] = {}
        self._final_rows: dict[tuple[int, int], torch.Tensor] = {}
        self._window_rows: dict[tuple[int, int], torch.Tensor] = {}
        self._captured: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._graph_pool: Any = None
        self._recording_stream: Any = recording_stream(model.device) if self.use_graphs else None

    @property
    def programs(self) -> Collection[StepProgram]:
        """Programs made so far."""
        return self._programs.values()

    def program(self, table: BlockTable, shape: StepShape) -> StepProgram:
        """The program of a shape, made (and recorded) when it is first asked for."""
        key = (table.block_length, shape)
        program = self._programs.get(key)
        if program is None:
            program = StepProgram(self, table, shape)
            if self.use_graphs:
                self._graph_pool = self._graph_pool or torch.cuda.graph_pool_handle()
                program.record(self._graph_pool, self._recording_stream)
            self._programs[key] = program  # not one whose recording failed
        return program

    def forget_programs(self) -> None:
        """Drop all programs: the rows of the arena that they read are to be replaced."""
        self._programs.clear()
        self._final_rows.clear()
        self._window_rows.clear()
        self._captured.clear()
        self._graph_pool = None

    def final_rows(self, finals: int, block_length: int) -> torch.Tensor:
        """Where programs leave the KV of final lanes: ``[finals, layers, kv_heads, B, 2 * head_dim]``.

        One tensor serves all programs with as many final lanes: the next step overwrites it.
        """
        key = (finals, block_length)
        if key not in self._final_rows:
            lanes = finals * self.model.config.num_full_layers
            self._final_rows[key] = self.new_rows(lanes, block_length).unflatten(0, (finals, -1))
        return self._final_rows[key]

    def captured(self, captures: int, block_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where programs leave captured queries, as `final_rows`.

        Returns:
            queries ``[captures, layers, B, heads, head_dim]`` of the model's dtype, and log-sum-exps
            float32 ``[captures, layers, B, heads]``.
        """
        key = (captures, block_length)
        if key not in self._captured:
            config, device = self.model.config, self.model.device
            shape = (captures, config.num_full_layers, block_length, config.num_heads)
            queries = torch.empty(*shape, config.head_dim, dtype=self.model.dtype, device=device)
            self._captured[key] = queries, torch.empty(shape, dtype=torch.float32, device=device)
        return self._captured[key]

    def final_window_rows(self, finals: int, block_length: int) -> torch.Tensor:
        """As `final_rows`, of the layers with a window."""
        windowed = self.model.config.windowed
        assert windowed is not None
        key = (finals, block_length)
        if key not in self._window_rows:
            shape = (finals, len(windowed.layers), windowed.num_kv_heads, block_length, 2 * windowed.head_dim)
            self._window_rows[key] = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        return self._window_rows[key]

    def new_rows(self, num_lanes: int, block_length: int, layer: int = -1) -> torch.Tensor:
        """Unwritten rows of lanes in one layer: ``[num_lanes, kv_heads, block_length, 2 * head_dim]``.

        The last layer, as every other without a window, stands for all of those.
        """
        form = self.model.config.attention[layer]
        shape = (num_lanes, form.num_kv_heads, block_length, 2 * form.head_dim)
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
        form = config.attention[layer]
        qkv = self.model.qkv(layer, hidden)
        q = qkv.new_empty(hidden.shape[0], config.num_heads, form.head_dim)
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
            form.num_kv_heads,
            config.rms_norm_eps,
            self.model.norm_values,
        )
        return q

"""The device work of one step, recorded once for every `StepShape` and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from herald.cuda_driver import RECORDING
from herald.engine.blocks import BlockTable
from herald.engine.lane_attention import LaneAttention
from herald.engine.lanes import StepInputs, StepPlan, StepShape
from herald.engine.noise_table import NoiseTable
from herald_kernels import (
    commit,
    commit_edits,
    copy_rows,
    entropy_softmax,
    greedy_confidence,
)

if TYPE_CHECKING:
    from herald.engine.runner import LaneRunner

# Lanes whose logits are alive at once: 32 positions of 152K tokens take 10 MB each.
HEAD_LANES = 8
# The same in positions, of canvases.
HEAD_POSITIONS = 256


def record_graph(run: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """``run`` as a CUDA graph. It runs once before, on inputs that change nothing.

    Args:
        pool: handle of the memory that all graphs share; they never run at the same time.
        stream: to record on, one for all graphs: cuBLAS keeps a workspace for every stream it has seen.
    """
    graph = torch.cuda.CUDAGraph()
    with RECORDING:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            run()  # compiles kernels and sets libraries up, which a recording must not do
        stream.synchronize()
        # Other threads copy and allocate meanwhile; only this one is held to what a recording allows.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph


class StepProgram:
    """Opens blocks, runs lanes through the model, commits; all on the device, without the host.

    Args:
        runner: gives model, arena and shared output tensors.
        table: blocks under way.
        shape: of the steps it runs.

    Attributes:
        inputs: int64 vector, written before each run (see `StepInputs`).
        report: int64 [R, B + 1] after a run: masks left (-1 for non-finite logits), then the tokens, below 0
            where masked. With ``shape.draws`` it is made by `commit` afterwards.
        rows_a_final: rows of a final lane over all layers and KV heads.
        final_rows: [F, layers, kv_heads, B, 2 * head_dim]; a run writes them to the arena too.
        queries, lse: [C, layers, B, heads, head_dim] and float32 [C, layers, B, heads].
        logits, best, confidence: of R lanes, kept only with ``shape.draws``. Of canvases the logits are those
            at their temperature, and in the place of confidences stand entropies.
    """

    def __init__(self, runner: LaneRunner, table: BlockTable, shape: StepShape) -> None:
        self.runner = runner
        self.table = table
        self.shape = shape
        model, block = runner.model, table.block_length
        self.rows_a_final = model.config.num_full_layers * model.config.num_kv_heads * block
        padding = StepPlan().pack(shape, table.masks_row, table.spare)
        none = np.full(shape.finals * self.rows_a_final, -1, dtype=np.int64)
        self.inputs = torch.from_numpy(np.concatenate([padding, none])).to(model.device)
        self._offsets = torch.arange(block, device=model.device)
        self.report: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.best: torch.Tensor | None = None
        self.confidence: torch.Tensor | None = None
        self.final_rows = runner.final_rows(shape.finals, block) if shape.finals else None
        self.window_rows: torch.Tensor | None = None
        if shape.finals and model.config.windowed is not None:
            self.window_rows = runner.final_window_rows(shape.finals, block)
        self.queries: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        if shape.captures:
            self.queries, self.lse = runner.captured(shape.captures, block)
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Record the run, on inputs that are all padding; see `record_graph`."""
        self._graph = record_graph(self._run, pool, stream)

    def run(self, inputs: torch.Tensor | None) -> None:
        """One step on the current stream.

        Args:
            inputs: int64 vector in (page-locked) host memory, unchanged until the step is done; None for the
                integers of the run before.
        """
        if inputs is not None:
            self.inputs.copy_(inputs, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def _run(self) -> None:
        runner, table, shape = self.runner, self.table, self.shape
        model, config = runner.model, runner.model.config
        block = table.block_length
        given = StepInputs.views(self.inputs, shape)
        if shape.logits:
            table.open(given)
        hidden = model.embed(table.rows.index_select(0, given.source).view(-1))
        causal: torch.Tensor | None = None
        if isinstance(table, NoiseTable):
            causal = (given.final > 0).repeat_interleave(block).unsqueeze(1)
            hidden = model.condition(hidden, table.lane_signal(given.source), causal)
        positions = (given.position.unsqueeze(1) + self._offsets).view(-1)
        phases = [model.rope(positions)]
        if config.windowed is not None:
            phases.append(model.rope(positions, windowed=True))
        attend = LaneAttention(runner, given, shape, causal is not None)
        for layer, form in enumerate(config.attention):
            rows = runner.new_rows(shape.lanes, block, layer)
            q = runner.project(layer, hidden, *phases[form.window > 0], rows)
            q = q.view(shape.lanes, block, config.num_heads, form.head_dim)
            out, lse = attend(layer, q, rows)
            hidden = model.finish_layer(layer, hidden, out.view(hidden.shape[0], -1), causal)
            if form.window:
                if self.window_rows is not None:
                    torch.index_select(rows, 0, given.final_lane, out=self.window_rows[:, form.place])
                continue
            if self.final_rows is not None:
                torch.index_select(rows, 0, given.final_lane, out=self.final_rows[:, form.place])
            if self.queries is not None and self.lse is not None:
                torch.index_select(q, 0, given.capture_lane, out=self.queries[:, form.place])
                torch.index_select(lse, 0, given.capture_lane, out=self.lse[:, form.place])
        # After the last layer: until then lanes of this step attend to what the slots held.
        if self.final_rows is not None:
            rows = self.final_rows.view(-1, self.final_rows.shape[-1])
            copy_rows(runner.arena.flat_rows, given.free_rows, rows, None)
        if self.window_rows is not None:
            attend.keep_window(self.window_rows)
        if shape.logits:
            chosen = hidden.view(shape.lanes, block, -1).index_select(0, given.logit_lane)
            # Of a lane of the block itself the last row comes first, which nobody reads: its first token is
            # known. Of the final lane before it that row is the one that predicts it.
            self._decide(chosen.roll(1, 1) if config.shifted else chosen, given)

    def _decide(self, hidden: torch.Tensor, given: StepInputs) -> None:
        """Head and commit of R lanes. ``hidden`` [R, B, hidden_size]: what predicts each position."""
        if isinstance(self.table, NoiseTable):
            self._decide_noise(hidden, given)
            return
        model, lanes = self.runner.model, self.shape.logits
        best, confidence, kept = [], [], []
        step = lanes if self.shape.draws else HEAD_LANES
        for first in range(0, lanes, step):
            logits = model.logits(hidden[first : first + step].flatten(0, 1))
            if self.shape.edits:
                self._exclude_mask(logits, given.slot[first : first + step])
            token, probability = greedy_confidence(logits)
            best.append(token)
            confidence.append(probability)
            kept.append(logits)
        self.best = torch.cat(best).view(lanes, -1)
        self.confidence = torch.cat(confidence).view(lanes, -1)
        if self.shape.draws:
            self.logits = kept[0].view(lanes, self.table.block_length, -1)
        else:
            self.commit(self.best, self.confidence)

    def _decide_noise(self, hidden: torch.Tensor, given: StepInputs) -> None:
        """As `_decide`, of canvases."""
        lanes, block = self.shape.logits, self.table.block_length
        step = max(1, HEAD_POSITIONS // block)
        parts = []
        for first in range(0, lanes, step):
            some = slice(first, first + step)
            logits = self.runner.model.logits(hidden[some].flatten(0, 1))
            parts.append(self._read_noise(logits, given.slot[some]))
        best, entropy, kept = (torch.cat(each) for each in zip(*parts, strict=True))
        self.best, self.confidence = best.view(lanes, -1), entropy.view(lanes, -1)
        if self.shape.draws:
            self.logits = kept.view(lanes, block, -1)
        else:
            self.commit(self.best, self.confidence)

    def _read_noise(
        self, logits: torch.Tensor, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arg-max tokens, entropies and, if they are kept, the tempered ``logits`` [L * B, vocab] of L slots.

        The probabilities become what conditions the next step.
        """
        model, table, block = self.runner.model, self.table, self.table.block_length
        assert isinstance(table, NoiseTable)
        temperature = table.temperature(slot).repeat_interleave(block)
        best, entropy, probabilities = entropy_softmax(logits, temperature, model.dtype)
        table.signal[slot] = model.soft_embedding(probabilities).view(-1, block, model.config.hidden_size)
        kept = logits.div_(temperature[:, None]) if self.shape.draws else entropy
        return best, entropy, kept

    def _exclude_mask(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Where blocks are edited no masked position may become a mask: -inf in ``logits`` [L * B, vocab]."""
        table = self.table
        edited = (table.edit_threshold[slots] < float("inf")).unsqueeze(1)
        logits[:, table.mask_id].masked_fill_((table.masked[slots] & edited).view(-1), float("-inf"))

    def take_logits(self, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        """Stand in for a run of one lane whose logits [B, vocab_size] were computed elsewhere."""
        self.inputs.copy_(inputs, non_blocking=True)
        if isinstance(self.table, NoiseTable):
            slot = StepInputs.views(self.inputs, self.shape).slot
            best, entropy, kept = self._read_noise(logits, slot)
            self.best, self.confidence = best.view(1, -1), entropy.view(1, -1)
            self.logits = kept.unsqueeze(0)
            return
        if self.shape.edits:
            self._exclude_mask(logits, StepInputs.views(self.inputs, self.shape).slot)
        token, probability = greedy_confidence(logits)
        self.best, self.confidence = token.view(1, -1), probability.view(1, -1)
        self.logits = logits.unsqueeze(0)

    def commit(self, candidate: torch.Tensor, confidence: torch.Tensor) -> None:
        """Fix candidates [R, B] by their confidence float32 [R, B]; makes the report.

        Of canvases the entropies decide, whatever ``confidence`` is.
        """
        given, table = StepInputs.views(self.inputs, self.shape), self.table
        assert self.best is not None
        if isinstance(table, NoiseTable):
            assert self.confidence is not None
            self.report = table.advance(given.slot, self.best, candidate, self.confidence)
            return
        if self.shape.edits:
            self.report = commit_edits(
                table.tokens,
                table.masked,
                table.draft,
                table.edits,
                table.edit_threshold,
                given.slot,
                given.opening,
                self.best,
                candidate,
                confidence,
                given.quota,
                table.threshold,
                table.mask_id,
            )
            return
        self.report = commit(
            table.tokens,
            table.masked,
            table.draft,
            given.slot,
            self.best,
            candidate,
            confidence,
            given.quota,
            table.threshold,
            table.window,
        )

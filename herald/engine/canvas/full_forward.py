"""One forward over prompt and canvas, every position seeing every position; layer by layer, in chunks.

A layer takes all chunks twice: first for their keys and values, then for their attention to all of them. So
one layer's KV is on the device, a few chunks of hidden states, and the queries of a layer where they are
small; otherwise they are computed a second time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from herald.engine.hidden_states import KEPT_BYTES, HiddenStates
from herald.engine.prefill import MAX_COPIES, NO_VOTE, FirstScores, RowStore, choose_exactly
from herald.engine.resident import ResidentSet
from herald.engine.runner import LaneRunner
from herald.transfer import Ticket
from herald_kernels import prefill_attention, resident_attention

# A layer reads its chunks for keys and values, then for attention.
KEYS, ATTENTION = 0, 1


@dataclass(frozen=True)
class Keep:
    """What of the rows stays on the device.

    Attributes:
        resident: takes rows of the prompt, and right before its slots those of the canvas.
        near: positions right behind the prompt, in the order of the forward, whose rows are kept.
        masked: bool [B], the positions of the block whose queries choose.
        scores: by which they do.
    """

    resident: ResidentSet
    near: int
    masked: torch.Tensor
    scores: FirstScores


class FullForward:
    """A resumable list of (layer, read, chunk) units.

    The block stands last, whatever its place on the canvas: rows carry their phase, so attention does not ask
    for an order. Its attention also gives the log-sum-exp that rows are chosen by.

    Args:
        runner: gives the model and its projections.
        tokens: int64 [n] on the device, the prompt first, the block's B last.
        positions: int64 [n], their positions.
        prompt: positions of the prompt.
        block_length: B.
        wanted: ranges in the order of ``tokens``, ascending, whose logits are needed.
        chunk: positions of a unit, with a row store rounded down to whole pages.
        keep: None to keep nothing.
        row_store: takes the prompt's rows to the host.

    Attributes:
        begun: a unit has run; before, nothing large is allocated.
        logits: [rows of ``wanted``, vocab_size] once `done`.
    """

    def __init__(
        self,
        runner: LaneRunner,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt: int,
        block_length: int,
        wanted: list[range],
        chunk: int,
        keep: Keep | None,
        row_store: RowStore | None,
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.prompt = prompt
        self.wanted = wanted
        self.keep = keep
        self.row_store = row_store
        self.layer, self.read, self.chunk = 0, KEYS, 0
        self.logits: torch.Tensor | None = None
        self.begun = False
        model, count = self.model, tokens.numel()
        unit = 1 if row_store is None else row_store.page_size
        starts = [*range(0, count - block_length, max(chunk // unit, 1) * unit), count - block_length]
        self.edges = [*starts, count]
        config = model.config
        self._tokens = tokens
        self._positions = positions
        self._hidden: HiddenStates | None = None
        self._rows: torch.Tensor | None = None
        width = config.num_heads * config.head_dim * model.dtype.itemsize
        self._keeps_queries = count * width <= KEPT_BYTES
        self._queries: dict[int, torch.Tensor] = {}
        self._final: list[torch.Tensor] = []
        self._stored: deque[Ticket] = deque()
        self._zero = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._no_parent = torch.full((1,), -1, dtype=torch.int32, device=model.device)
        others = (1, config.num_kv_heads)
        self._others = torch.full(others, starts[-1], dtype=torch.int32, device=model.device)

    @property
    def done(self) -> bool:
        """Every layer has seen every position."""
        return self.layer == self.model.config.num_layers

    @property
    def share_done(self) -> float:
        """Of all units, in [0, 1]."""
        chunks = len(self.edges) - 1
        units = (2 * self.layer + self.read) * chunks + self.chunk
        return units / (2 * chunks * self.model.config.num_layers)

    @property
    def next_unit(self) -> tuple[int, int]:
        """Positions of the unit that `run_unit` runs, and positions that they attend to."""
        return self.edges[self.chunk + 1] - self.edges[self.chunk], self.edges[-1]

    def run_unit(self) -> None:
        """Run one unit; the last one gives the logits."""
        states = self._states()
        start, end = self.edges[self.chunk], self.edges[self.chunk + 1]
        hidden = states.take(self.layer, self.chunk, self.read)
        if self.read == KEYS:
            self._make_rows(hidden, start, end)
            states.give_back(self.chunk, changed=False)
        elif self._is_read(start, end):
            self._attend(hidden, start, end)
            states.give_back(self.chunk)
        else:
            self._queries.pop(self.chunk, None)
            states.give_back(self.chunk, changed=False)
        self.chunk += 1
        if self.chunk == len(self.edges) - 1:
            self._next_read()

    def close(self) -> None:
        """Give up half-way: let go of hidden states and rows. Idempotent."""
        if self._hidden is not None:
            self._hidden.close()
        self._rows = None
        self._queries.clear()

    def _states(self) -> HiddenStates:
        """Hidden states, and room for a layer's rows, made when they are first asked for."""
        if self._hidden is None:
            model, config = self.model, self.model.config
            starts = self.edges[:-1]
            self._hidden = HiddenStates(
                model.embed, self._tokens, config.hidden_size, model.dtype, starts, reads=2
            )
            shape = (config.num_kv_heads, self.edges[-1], 2 * config.head_dim)
            self._rows = torch.empty(shape, dtype=model.dtype, device=model.device)
            self.begun = True
        return self._hidden

    def _next_read(self) -> None:
        self.chunk = 0
        self.read = ATTENTION if self.read == KEYS else KEYS
        self.layer += self.read == KEYS
        if self.done:
            self.close()
            self.logits = self.model.logits(torch.cat(self._final))
            self._final.clear()
            if self.keep is not None and not self.keep.resident.config.enabled:
                self.keep.resident.mark_dense(self.prompt)

    def _is_read(self, start: int, end: int) -> bool:
        """Whether anything depends on a chunk's output: in the last layer only rows that are wanted."""
        last = self.layer == self.model.config.num_layers - 1
        return not last or end == self.edges[-1] or any(r.start < end and start < r.stop for r in self.wanted)

    def _make_rows(self, hidden: torch.Tensor, start: int, end: int) -> None:
        """Keys and values of a chunk; the prompt's leave for the host, if anybody waits for them there."""
        assert self._rows is not None
        rows = self._rows[:, start:end]
        q = self._project(hidden, start, end, rows)
        if self._keeps_queries:
            self._queries[self.chunk] = q
        if self.row_store is not None and start < self.prompt:
            if len(self._stored) == MAX_COPIES:
                self._stored.popleft().wait_host()
            self._stored.append(self.row_store.store(self.layer, start, rows[:, : self.prompt - start]))

    def _attend(self, hidden: torch.Tensor, start: int, end: int) -> None:
        """The layer's output of a chunk, in the place of its input."""
        assert self._rows is not None
        rows, scale = self._rows, self.model.softmax_scale
        q = self._queries.pop(self.chunk, None)
        if q is None:
            q = self._project(hidden, start, end, self.runner.new_rows(1, end - start)[0])
        if end < self.edges[-1]:
            out = prefill_attention(q, rows, start, rows.shape[1], scale)
        else:
            own = rows[:, start:].unsqueeze(0)
            lanes, lse = resident_attention(
                q.unsqueeze(0), own, rows, self._zero, self._others, self._no_parent, scale, start
            )
            out = lanes[0]
            self._keep_rows(q, lse[0], rows)
        hidden.copy_(self.model.finish_layer(self.layer, hidden, out.reshape(end - start, -1)))
        if self.layer == self.model.config.num_layers - 1:
            for part in self.wanted:
                first, last = max(part.start, start), min(part.stop, end)
                if first < last:
                    self._final.append(hidden[first - start : last - start].clone())

    def _keep_rows(self, q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy what the block's cached steps attend to into the arena.

        Args:
            q: [B, heads, head_dim] of the block. lse: [B, heads]. rows: [kv_heads, n, 2 * head_dim].
        """
        if self.keep is None:
            return
        resident, near, end = self.keep.resident, self.keep.near, self.prompt
        begin = resident.row_start
        resident.arena.rows[self.layer, :, begin - near : begin].copy_(rows[:, end : end + near])
        if not resident.config.enabled:
            resident.layer_view(self.layer).copy_(rows[:, :end])
            return
        asking = lse.masked_fill(~self.keep.masked.unsqueeze(1), NO_VOTE)
        scores, scale = self.keep.scores, self.model.softmax_scale
        chosen = choose_exactly(resident, q, asking, rows[:, :end], scale, scores)
        resident.fill(self.layer, rows[:, :end], chosen, end)

    def _project(self, hidden: torch.Tensor, start: int, end: int, rows: torch.Tensor) -> torch.Tensor:
        cos, sin = self.model.rope(self._positions[start:end])
        return self.runner.project(self.layer, hidden, cos, sin, rows.unsqueeze(0))

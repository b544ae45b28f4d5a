"""Layer-major prefill: every prompt position passes layer l before any passes layer l+1.

One layer's KV is on the device at a time, beside copies of a few chunks on their way to the host, and of a
long prompt three chunks of hidden states. So peak memory does not grow with the number of layers, and with a
prompt only by the KV of one layer. The work is a list of (layer, chunk) units that a scheduler can spread
over steps. The lane of the first block to decode runs along: while a layer's whole KV is there its queries
choose the first resident set, exactly, and its logits are step 0 of the first block.

Positions whose pages are shared with an earlier prompt are not computed: their rows come from the host
pool, a layer at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from herald.engine.hidden_states import HiddenStates
from herald.engine.layer_rows import LayerRows, LoadLayer, WindowRows
from herald.engine.prefill_plan import PrefillPlan
from herald.engine.resident import ResidentSet
from herald.engine.runner import LaneRunner
from herald.models.noise_config import AttentionShape
from herald.transfer import Ticket
from herald_kernels import prefill_attention, resident_attention, score_rows

# Log-sum-exp given to queries of known positions: no row gets a score from them.
NO_VOTE = 1e30

# Pieces whose rotary phases are kept.
MAX_KEPT_PHASES = 12
# Copies of chunks on their way to the host.
MAX_COPIES = 6

# (q [B, heads, head_dim], lse [B, heads], rows [kv_heads, n, 2 * head_dim], scale, span that is chosen from)
# -> float32 [kv_heads, n]; see `herald_kernels.score_rows`.
FirstScores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, tuple[int, int]], torch.Tensor]


@dataclass(frozen=True)
class RowStore:
    """Where prefill sends the prompt's rows, and whence it has those of a shared prefix.

    Attributes:
        store: called with (layer, start, rows [kv_heads, c, 2 * head_dim]) for every chunk; copies it to the
            host and returns the copy's ticket.
        page_size: chunks begin at multiples of it.
        shared: first positions whose rows are there, whole pages.
        load: brings them. None where there are none.
    """

    store: Callable[[int, int, torch.Tensor], Ticket]
    page_size: int
    shared: int = 0
    load: LoadLayer | None = None


def scores_by(operator: str) -> FirstScores:
    """Exact scores of all rows, by an operator of `OffloadConfig`."""

    def scores(
        q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, span: tuple[int, int]
    ) -> torch.Tensor:
        return score_rows(q, lse, rows, scale, operator)

    return scores


def asking(masked: torch.Tensor, shifted: bool) -> torch.Tensor:
    """Positions of a block whose queries choose rows: the masked ones, and those that predict them.

    Args:
        masked: bool [B].
        shifted: a position is predicted by the one before it.
    """
    if not shifted:
        return masked
    predicting = torch.zeros_like(masked)
    predicting[:-1] = masked[1:]
    return masked | predicting


class PrefillTask:
    """Prefill of one request.

    Args:
        runner: gives the model and its projections.
        resident: the request's set, filled layer by layer.
        prefix_tokens: int64 [n] on the device, whole blocks of the prompt.
        block_tokens: int64 [B], the first block to decode: prompt tail, then mask ids.
        masked: bool [B], positions of it to decode; only their queries choose rows, and those that predict
            them.
        chunk: positions of a unit, rounded down to whole blocks, with offload to whole pages; at least one.
        row_store: takes the rows to the host. None without offload.
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
        row_store: RowStore | None,
        scores: FirstScores,
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.resident = resident
        self.asking = asking(masked, runner.model.config.shifted)
        self.scores = scores
        self.row_store = row_store
        self.prefix = prefix_tokens.numel()
        self.block_length = block_tokens.numel()
        whole = self.block_length if row_store is None else row_store.page_size
        self.plan = PrefillPlan.of(chunk, whole)
        self.shared = 0 if row_store is None else row_store.shared
        self.starts = self.plan.starts(self.shared, self.prefix)
        self.layer = 0
        self.chunk = 0
        self.logits: torch.Tensor | None = None

        model, device = self.model, self.model.device
        computed = [start - self.shared for start in self.starts]
        config = model.config
        self._causal = torch.ones(1, 1, dtype=torch.bool, device=device) if config.noise is not None else None
        self._visible = self.block_length if self._causal is None else 1
        self._hidden = HiddenStates(
            model.embed, prefix_tokens[self.shared :], model.config.hidden_size, model.dtype, computed
        )
        self._lane_hidden = model.embed(block_tokens)
        self._last_hidden: torch.Tensor | None = None  # of the prefix's last position, behind all layers
        if self._causal is not None:
            nothing = torch.zeros_like(self._lane_hidden)
            self._lane_hidden = model.condition(self._lane_hidden, nothing, ~self._causal)
        self._phases: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._window: WindowRows | None = None
        if config.windowed is not None:
            self._window = WindowRows(config.windowed, min(self.plan.step, self.prefix), model.dtype, device)
        shape = (config.num_kv_heads, self.prefix, 2 * config.head_dim)
        self._rows: LayerRows | None = None
        if row_store is not None:
            layers = config.num_full_layers
            self._rows = LayerRows(shape, model.dtype, device, layers, self.shared, row_store.load)
        self._layer_rows: torch.Tensor | None = None
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_parent = torch.full((1,), -1, dtype=torch.int32, device=device)
        self._stored: deque[Ticket] = deque()

    @property
    def done(self) -> bool:
        """Every layer has seen every position."""
        return self.layer == self.model.config.num_layers

    @property
    def progress(self) -> int:
        """Tokens x layers that are done."""
        within = self.starts[self.chunk] if self.chunk else 0
        return self.layer * self.prefix + within

    @property
    def next_unit(self) -> tuple[int, int]:
        """Positions of the unit that `run_unit` runs, and positions that they attend to."""
        start = self.starts[self.chunk]
        end = self.plan.end(start, self.prefix)
        return end - start, end

    def run_unit(self) -> None:
        """Run one (layer, chunk) unit; the last of a layer also runs the first block's lane."""
        form = self.model.config.attention[self.layer]
        if self._layer_rows is None and not form.window:
            own = self._rows
            view = self.resident.layer_view(form.place) if own is None else own.begin(form.place)
            self._layer_rows = view[:, : self.prefix]
        count, end = self.next_unit
        start = end - count
        if end > start:  # a prompt shorter than a block, or shared as a whole, has no work but its lane
            hidden = self._hidden.take(self.layer, self.chunk)
            for first, last in self.plan.pieces(start, end):
                self._run_piece(hidden[first - start : last - start], first)
            if end == self.prefix and self.layer + 1 == self.model.config.num_layers:
                self._last_hidden = hidden[-1:].clone()
            self._hidden.give_back(self.chunk)
            if self.row_store is not None and self._layer_rows is not None:
                if len(self._stored) == MAX_COPIES:
                    self._stored.popleft().wait_host()
                self._stored.append(self.row_store.store(form.place, start, self._layer_rows[:, start:end]))
        self.chunk += 1
        if self.chunk == len(self.starts):
            rows = self._layer_rows
            if rows is None:
                assert self._window is not None
                rows = self._window.last
            self._finish_layer(rows, form)

    def close(self) -> None:
        """Give up half-way: let go of the prompt's hidden states and rows. Idempotent."""
        self._hidden.close()
        if self._rows is not None:
            self._rows.close()
        self._rows = self._layer_rows = None
        self._window = None

    def _run_piece(self, hidden: torch.Tensor, first: int) -> None:
        """Take positions from ``first`` on through the layer, ``hidden`` [c, hidden_size] in place."""
        rows = self._layer_rows
        out = self._attend_window(hidden, first) if rows is None else self._attend(hidden, first, rows)
        out = out.reshape(len(hidden), -1)
        hidden.copy_(self.model.finish_layer(self.layer, hidden, out, self._causal))

    def _attend(self, hidden: torch.Tensor, first: int, rows: torch.Tensor) -> torch.Tensor:
        """Attention of a piece in a layer without a window, to ``rows`` [kv_heads, n, 2 * head_dim]."""
        last = first + len(hidden)
        cos, sin = self._rope(first, last)
        q = self.runner.project(self.layer, hidden, cos, sin, rows[:, first:last].unsqueeze(0))
        return prefill_attention(q, rows[:, :last], first, self._visible, self.model.softmax_scale)

    def _attend_window(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """Attention of a piece in a layer with a window."""
        window, size = self._window, len(hidden)
        assert window is not None
        rows, before = window.take(first, size)
        cos, sin = self._rope(first, first + size, windowed=True)
        q = self.runner.project(self.layer, hidden, cos, sin, rows[:, before:].unsqueeze(0))
        return prefill_attention(q, rows, before, self._visible, self.model.softmax_scale, window.length)

    def _finish_layer(self, rows: torch.Tensor, form: AttentionShape) -> None:
        """Run the first block's lane through the layer, choose its rows, send the KV away.

        ``rows`` [kv_heads, n, 2 * head_dim]: of the whole prompt, or of its last positions with a window.
        """
        cos, sin = self._rope(self.prefix, self.prefix + self.block_length, form.window > 0)
        lane_rows = self.runner.new_rows(1, self.block_length, self.layer)
        q = self.runner.project(self.layer, self._lane_hidden, cos, sin, lane_rows)
        out, lse = resident_attention(
            q.unsqueeze(0),
            lane_rows,
            rows,
            self._zero,
            torch.full(rows.shape[:1], rows.shape[1], dtype=torch.int32, device=rows.device).unsqueeze(0),
            self._no_parent,
            self.model.softmax_scale,
            rows.shape[1],
        )
        attn = out.reshape(self.block_length, -1)
        canvas = None if self._causal is None else ~self._causal
        self._lane_hidden = self.model.finish_layer(self.layer, self._lane_hidden, attn, canvas)
        if form.window:
            self.resident.fill_window(form.place, rows, self.prefix)
        elif self.row_store is not None and self.prefix:
            self.resident.fill(form.place, rows, self._choose(q, lse[0], rows), self.prefix)
        self.layer += 1
        self.chunk = 0
        self._layer_rows = None
        if self.done:
            self._hidden.close()
            if self.row_store is None:
                self.resident.mark_dense(self.prefix)
            self.logits = self.model.logits(self._predicting())

    def _predicting(self) -> torch.Tensor:
        """Hidden states [B, hidden_size] that predict each position of the block."""
        if not self.model.config.shifted:
            return self._lane_hidden
        # A prompt shorter than a block has no row before the block, and its first token is the prompt's.
        before = self._lane_hidden[-1:] if self._last_hidden is None else self._last_hidden
        return torch.cat([before, self._lane_hidden[:-1]])

    def _rope(self, start: int, end: int, windowed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions ``[start, end)``; those of a few pieces are kept from layer to layer."""
        phases = self._phases.get((start, windowed))
        if phases is None:
            phases = self.model.rope(torch.arange(start, end, device=self.model.device), windowed)
            if len(self._phases) <= MAX_KEPT_PHASES:
                self._phases[start, windowed] = phases
        return phases

    def _choose(self, q: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Exact first selection of a layer: int64 [kv_heads, T(n)], ascending."""
        votes = lse.masked_fill(~self.asking.unsqueeze(1), NO_VOTE)
        return choose_exactly(self.resident, q, votes, rows, self.model.softmax_scale, self.scores)


def choose_exactly(
    resident: ResidentSet,
    q: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    scores_of: FirstScores,
) -> torch.Tensor:
    """The set of a layer while all its rows are on the device: int64 [kv_heads, T(n)], ascending.

    Args:
        q: [B, heads, head_dim]. lse: [B, heads], `NO_VOTE` for a query that does not count.
        rows: [kv_heads, n, 2 * head_dim].
    """
    prefix = rows.shape[1]
    size = resident.size_for(prefix)
    if size == prefix:
        return torch.arange(prefix, device=rows.device).expand(rows.shape[0], -1)
    first, last, _ = resident.candidates(prefix)
    scores = scores_of(q, lse, rows, scale, (first, last))
    scores[:, :first] = float("inf")
    scores[:, last:] = float("inf")
    return torch.topk(scores, size, dim=1, sorted=False).indices.sort(dim=1).values

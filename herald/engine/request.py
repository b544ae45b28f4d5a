"""State of one request, from its arrival to its last block."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch

from herald.decode import StopChecker
from herald.errors import HeraldError
from herald.outputs import FinishReason
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald.engine.prefill import PrefillTask
    from herald.engine.resident import ResidentSet
    from herald.engine.retriever import Selection


class Phase(Enum):
    """Where a request stands."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass
class Counters:
    """Running totals behind `RequestMetrics`."""

    blocks: int = 0
    steps: int = 0
    forwards: int = 0
    lookaheads: int = 0
    boundary_selections: int = 0
    late_selections: int = 0
    exposed_seconds: float = 0.0
    selection_seconds: float = 0.0
    transfer_seconds: float = 0.0
    rows_selected: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0
    host_kv_bytes: int = 0
    resident_bytes: int = 0


@dataclass(eq=False)
class Request:
    """One request.

    Attributes:
        checker: takes the tokens of finished blocks and says when the output is complete.
        tokens: int64 [B] on the device, the current block; masked: bool [B], what is still to decode.
        draft: int64 [B], arg-max tokens of the last step where masked, the committed ones elsewhere.
        closed: int64 [B], the finished block before the current one while its final KV is not computed.
        selection: the look-ahead or late selection that is under way.
        selected_block: the last block whose selection was applied.
        store_error: what went wrong when rows were stored or indexed; the next selection raises it.
        output_ids: tokens of finished blocks, cut where the output ends.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    block_length: int
    eos_token_ids: tuple[int, ...]
    checker: StopChecker
    prompt: str | None = None
    arrived: float = field(default_factory=time.perf_counter)

    phase: Phase = Phase.WAITING
    prefill_started: float = 0.0
    prefilled: float = 0.0
    first_block_done: float = 0.0
    finished_at: float = 0.0
    finish_reason: FinishReason | None = None
    error: HeraldError | None = None
    abort_requested: bool = False

    pages: np.ndarray | None = None
    resident: ResidentSet | None = None
    prefill: PrefillTask | None = None
    generator: torch.Generator | None = None

    block: int = 0
    step: int = 0
    selected_block: int = -1
    tokens: torch.Tensor | None = None
    masked: torch.Tensor | None = None
    draft: torch.Tensor | None = None
    closed: torch.Tensor | None = None
    selection: Selection | None = None
    store_error: BaseException | None = None

    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    counters: Counters = field(default_factory=Counters)

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of the prompt, which prefill takes."""
        return len(self.prompt_ids) // self.block_length

    @property
    def last_block(self) -> int:
        """Index of the last block that can be decoded."""
        return (len(self.prompt_ids) + self.params.max_tokens - 1) // self.block_length

    @property
    def first_prefix(self) -> int:
        """Positions before the first block that is decoded."""
        return self.prompt_blocks * self.block_length

    @property
    def last_prefix(self) -> int:
        """Positions before the last block that can be decoded."""
        return self.last_block * self.block_length

    @property
    def prefix(self) -> int:
        """Positions before the current block."""
        return self.block * self.block_length

    @property
    def prompt_in_block(self) -> int:
        """Prompt tokens at the head of the current block."""
        return min(max(len(self.prompt_ids) - self.prefix, 0), self.block_length)

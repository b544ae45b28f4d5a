"""State of one request, from its arrival to its last block."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from herald.config import OffloadConfig
from herald.decode import Policy, StopChecker
from herald.decode.policy import DecodePolicy
from herald.engine.arena import DeviceArena
from herald.engine.lookahead import Pace
from herald.engine.resident import ResidentSet
from herald.errors import HeraldError
from herald.outputs import FinishReason
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald.engine.prefill import PrefillTask
    from herald.engine.retriever import Selection
    from herald.engine.selection_clock import SelectionTimes
    from herald.engine.shared_prefix import PrefixNames
    from herald.kvstore import CachedPage


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
    cached_tokens: int = 0
    host_kv_bytes: int = 0
    resident_bytes: int = 0


@dataclass(eq=False)
class Request:
    """One request.

    Attributes:
        checker: takes the tokens of finished blocks and says when the output is complete.
        windows: lengths of the parts of a block that are decoded one after the other.
        leads: the final lane of a block also predicts the first token of the next: a block begins with a step
            that commits this token alone, its lead step, before its own lanes run.
        offload: the engine's options, with the request's own budget.
        slot: of the block table; -1 before it has one.
        block, step: the block being denoised and the steps of it that were launched.
        left: its masked positions after those steps, of a canvas the steps that may still come. Exact where a
            step commits what the host knows; else as of the last report that was read, and 0 only when no
            position is masked (and none may be edited any more).
        plain_until: steps of the block below this one have neither look-ahead nor refresh, and find nothing
            to apply: they differ from the step before in their quota only.
        unread: launched steps whose reports were not read yet.
        waits_since: when the device had done all steps of a request that cannot go on without its rows.
        pace: how fast its blocks lose their masks, where a threshold decides.
        selection: the look-ahead, boundary or late selection that is under way.
        times: of that selection, where somebody measures them.
        missed: selections that were given up; their rows may still be on the way.
        selected_block: the last block whose selection was applied.
        committed: positions that the last step committed, where a threshold decides.
        reported: tokens of the block after that step; where it left a mask, -1 - the draft's token.
        selected_in: (block, step) that selected last with its own queries before it committed.
        stored: the last job that stores or indexes rows of the request; a selection comes after it.
        store_error: what went wrong when rows were stored or indexed; the next selection raises it.
        shared: its first pages, which it shares.
        prefix_names: names of the pages of its prompt, once somebody asked for them.
        final_positions: first positions whose final KV was sent to the pool.
        output_ids: tokens of finished blocks, cut where the output ends.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    block_length: int
    eos_token_ids: tuple[int, ...]
    checker: StopChecker
    policy: Policy
    prompt: str | None = None
    windows: tuple[int, ...] = ()
    leads: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)
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
    shared: list[CachedPage] = field(default_factory=list)
    prefix_names: PrefixNames | None = None
    final_positions: int = 0
    resident: ResidentSet | None = None
    prefill: PrefillTask | None = None
    generator: torch.Generator | None = None

    slot: int = -1
    block: int = 0
    step: int = 0
    left: int = 0
    plain_until: int = 0
    unread: int = 0
    waits_since: float | None = None
    selected_block: int = -1
    committed: int = 0
    reported: list[int] = field(default_factory=list)
    selected_in: tuple[int, int] = (-1, -1)
    pace: Pace = field(default_factory=Pace)
    selection: Selection | None = None
    times: SelectionTimes | None = None
    missed: list[Selection] = field(default_factory=list)
    stored: Future[None] | None = None
    store_error: BaseException | None = None

    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    counters: Counters = field(default_factory=Counters)

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of the prompt, and so the index of the first block that is decoded."""
        return len(self.prompt_ids) // self.block_length

    @property
    def last_block(self) -> int:
        """Index of the last block that can be decoded."""
        last = len(self.prompt_ids) + self.params.max_tokens - 1
        return self.block_at(last)

    @property
    def first_prefix(self) -> int:
        """Positions before the first block that is decoded."""
        from_prompt = isinstance(self.policy, DecodePolicy) and self.policy.blocks_from_prompt
        return len(self.prompt_ids) if from_prompt else self.prompt_blocks * self.block_length

    def start_of(self, block: int) -> int:
        """Position of the first token of a block that is decoded."""
        return self.first_prefix + (block - self.prompt_blocks) * self.block_length

    def block_at(self, position: int) -> int:
        """Index of the block that is decoded and holds that position."""
        return self.prompt_blocks + (position - self.first_prefix) // self.block_length

    @property
    def last_prefix(self) -> int:
        """Positions before the last block that can be decoded."""
        return self.start_of(self.last_block)

    @property
    def prefix(self) -> int:
        """Positions before the current block."""
        return self.start_of(self.block)

    @cached_property
    def quotas(self) -> list[int]:
        """Positions that each step of a block commits at least."""
        assert isinstance(self.policy, DecodePolicy)
        return self.policy.quotas(self.block_length, self.params)

    @property
    def whole(self) -> int:
        """What is left of a block that has just begun, counted as ``left`` is."""
        return sum(self.quotas)

    @property
    def step_quota(self) -> int:
        """Positions that the next step commits at least."""
        return self.quotas[min(self.step, len(self.quotas) - 1)]

    @property
    def steps_to_come(self) -> int | None:
        """Steps of the block after the next one; with a threshold a low estimate, or None without any."""
        if not self.is_certain:
            left = self.pace.steps_left(self.left)
            return None if left is None else left - 1
        left, count = self.left - self.commits(self.left, self.step), 0
        while left > 0:
            count += 1
            left -= self.commits(left, self.step + count)
        return count

    def commits(self, left: int, step: int) -> int:
        """Positions that a step commits in a block with ``left`` masks, where no threshold adds to them."""
        quota = self.quotas[min(step, len(self.quotas) - 1)]
        if len(self.windows) < 2:
            return min(quota, left)
        return min(quota, left - next(behind for behind in self._behind if behind < left)) if left else 0

    @cached_property
    def _behind(self) -> list[int]:
        """For each window, the positions of those behind it."""
        return [sum(self.windows[index + 1 :]) for index in range(len(self.windows))]

    @property
    def is_plain(self) -> bool:
        """Whether the next step only denoises; see ``plain_until``."""
        return self.left > 0 and self.step < self.plain_until

    @property
    def is_certain(self) -> bool:
        """Whether the host knows how many positions a step commits before it has run."""
        assert isinstance(self.policy, DecodePolicy)
        return self.policy.is_certain(self.params)

    @property
    def edits(self) -> bool:
        """Whether tokens of a block may change until it ends."""
        return self.params.editing_threshold is not None

    @property
    def may_stop(self) -> bool:
        """Whether what a block says can end the request before its last block."""
        return bool(self.eos_token_ids or self.params.stop)

    def prompt_in_block(self, block: int) -> int:
        """Prompt tokens at the head of a block."""
        return min(max(len(self.prompt_ids) - self.start_of(block), 0), self.block_length)

    def prefix_of(self, block: int) -> int:
        """Positions that a selection for a block is made from."""
        return self.start_of(block)

    @property
    def stored_positions(self) -> int:
        """Positions whose rows the host pool takes, in the end."""
        return self.last_prefix

    def required_rows(self, offload: OffloadConfig) -> int:
        """Rows of the arena for all blocks the request can use."""
        prefixes = (self.first_prefix, self.last_prefix)
        return sum(ResidentSet.required_rows(offload, self.block_length, *prefixes))

    def make_resident(self, arena: DeviceArena, offload: OffloadConfig) -> ResidentSet:
        """The resident set, with its rows. Raises MemoryError when the arena has no range for them now."""
        return ResidentSet(arena, offload, self.block_length, self.first_prefix, self.last_prefix)

    def drop_prefill(self) -> None:
        """Let go of the prefill, and of its memory if it was given up half-way."""
        task, self.prefill = self.prefill, None
        if task is not None:
            task.close()

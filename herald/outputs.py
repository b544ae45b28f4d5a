"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Progress:
    """How far a request is, given to the ``progress`` callback as work goes on.

    Attributes:
        phase: what is counted: ``"prefill"`` in tokens x layers, ``"decode"`` in output tokens.
        done: units finished, never falling within a phase.
        total: units in all; a request may end before it (EOS, a stop string).
    """

    request_id: str
    phase: Phase
    done: int
    total: int


@dataclass(frozen=True)
class RequestMetrics:
    """Counts and times of one request. Times in seconds, sizes in bytes.

    Attributes:
        exposed_seconds: time in which the request waited for a selection or a transfer.
        selection_seconds: CPU time-on-the-clock of its selections, hidden or not.
        transfer_seconds: time its rows were on their way, hidden or not.
        rows_selected: rows chosen, summed over blocks, layers and KV heads.
        rows_moved: rows that crossed from host to device.
        cached_tokens: prompt tokens whose KV was there, in pages shared with an earlier request.
        host_kv_bytes: KV bytes of its pages in the host pool, shared ones too.
        resident_bytes: device bytes of its resident set and staging.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    steps: int = 0
    forwards: int = 0
    lookaheads: int = 0
    boundary_selections: int = 0
    late_selections: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_block_seconds: float = 0.0
    exposed_seconds: float = 0.0
    selection_seconds: float = 0.0
    transfer_seconds: float = 0.0
    rows_selected: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0
    cached_tokens: int = 0
    host_kv_bytes: int = 0
    resident_bytes: int = 0

    @property
    def steps_per_block(self) -> float:
        return self.steps / self.blocks if self.blocks else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over decode time, without prefill; 0 where prefill's own step decoded them all."""
        return self.output_tokens / self.decode_seconds if self.decode_seconds and self.steps != 1 else 0.0


@dataclass(frozen=True)
class PrefixStats:
    """What prefix sharing did since the engine was made, and what it holds now.

    Attributes:
        lookups: prompts that were looked up, one for each prefill.
        hits: those of them that found pages.
        hit_tokens: tokens whose prefill was skipped.
        evicted_pages: pages that gave way to others.
        cached_pages: finished pages that are held, in use or not.
        pinned_pages: those of them that loaded prefixes keep.
    """

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    cached_pages: int = 0
    pinned_pages: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """One completion: text, token ids (after cutting at EOS, stop strings and ``max_tokens``)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """State of a request when it finished, or after a finished block when streaming."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

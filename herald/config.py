"""Options of the runtime: frozen dataclasses, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal

from herald.errors import InvalidOption

IndexBits = Literal[16, 8, 4, 1]
ScoreOperator = Literal["max", "sum"]
Lookahead = Literal["fixed", "late"]
LateAction = Literal["wait", "proceed"]
LookaheadContext = Literal["draft", "block"]
TransferMode = Literal["auto", "zero_copy", "staged"]


def check(ok: bool, field: str, value: object, remedy: str) -> None:
    """Raise `InvalidOption` naming ``field`` and ``value`` unless ``ok``."""
    if not ok:
        raise InvalidOption(f"{field}={value!r} is not valid", remedy, field)


def is_whole(value: object) -> bool:
    """Whether ``value`` is an integer of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number of Python or numpy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_kinds(options: Any, optional: tuple[str, ...] = ()) -> None:
    """Hold each field of a dataclass to the kind of its default: bool, whole number or number.

    Args:
        optional: fields that may be None.

    Raises:
        InvalidOption: names the field and its value.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None and field.name in optional:
            continue
        if isinstance(field.default, bool):
            check(isinstance(value, bool), field.name, value, "use True or False")
        elif isinstance(field.default, int):
            check(is_whole(value), field.name, value, f"use a whole number, such as {field.default}")
        elif isinstance(field.default, float):
            check(is_number(value), field.name, value, f"use a number, such as {field.default}")


@dataclass(frozen=True)
class OffloadConfig:
    """How the KV cache lives in host memory and what of it visits the device.

    Args:
        enabled: keep the full KV in the host pool; False keeps every row on the device.
        kv_budget: rows a request attends to / rows of its prefix, in (0, 1]. Sinks and the recent
            window count towards it. 1.0 means every row.
        sink_rows: first positions of the prompt that are always resident.
        recent_rows: last positions of the prefix that are always resident; at least one block.
        min_resident_rows: floor of the set's size, so that a short prompt is not starved.
        index_bits: bits a key component takes in the index that the CPU scans (16 is exact).
        score_operator: ``"max"`` of the normalised attention over queries and grouped heads, or
            ``"sum"``.
        lookahead: ``"fixed"`` runs the look-ahead for block i+1 in ``lookahead_step`` of block i; ``"late"``
            as late as measured times say that its rows still arrive in time, and not before that step. A
            late draft selects better, but the rows chosen then depend on timing and may differ from run to
            run; a fixed step near the block's end has late drafts without that.
        lookahead_step: step of a block, counted from 0. A block that ends before its look-ahead selects at
            its end, with the finished tokens (exposed).
        lookahead_context: what the masks of block i+1 attend to in the look-ahead besides the resident set:
            ``"draft"``, a lane of block i with its arg-max tokens filled in, or ``"block"``, block i as it
            is in that step, which saves a lane.
        refresh_step: step of a block (from 1) whose own queries select for the block anew; 0 for never. The
            rows are there from step ``refresh_step + refresh_lag`` on, and a look-ahead comes after that: a
            request with a fixed number of steps has to have such a step, and a block that ends before it
            (with a threshold, or begun by the prompt) selects at its end.
        refresh_lag: steps that selection and transfer of a refresh may take; the block waits for them then.
        refresh_commits: where a threshold decides: after a step that committed at least this share of its
            block's positions, the next one first selects with its own queries, in a forward more, and commits
            when it has those rows; and a block whose look-ahead took half that share of the block before for
            other tokens selects anew at its begin. A look-ahead under way is given up for that; the wait is
            exposed. 0 for never; never with ``on_late="proceed"``, which waits for nothing. What is sure at
            once makes other rows wanted at once, and the next step may be as sure without them.
        on_late: ``"wait"`` for a selection that is not there when its block begins, or
            ``"proceed"`` with the old set and apply it when it lands.
        difference_only: move only rows that are not resident yet; False moves the whole selection
            (a switch for measurements and tests).
        verify_transfers: compare every transferred row with its source (slow; a checksum mode).
        page_size: token positions a page of the host pool holds; a multiple of the block length,
            or 0 to choose it.
        host_memory_bytes: size of the host pool, or 0 to size it for the requests that run at once.
        prefix_sharing: requests that begin with the same tokens share finished pages, and a later one skips
            their prefill. Pages that nobody uses stay until the pool needs them: a larger pool remembers
            more. Not for families whose positions see later ones.
        transfer: ``"zero_copy"``, ``"staged"``, or ``"auto"`` for the better one available.
        num_threads: CPU threads of selection, 0 for all usable cores, less two beside a GPU.
        scan_on_device: let the device score a share of the index, which crosses the bus for that; the rows
            chosen are the same. Needs CUDA, an index of 8 or 4 bits and the C++ extension, and is left
            out where one of them is missing.
        index_device_bytes: device memory that may hold layers of the index, scored there without crossing the
            bus again: selection is then faster and takes fewer cores. An index takes about a quarter of the
            KV with 8 bits, an eighth with 4. 0 for none. Needs ``scan_on_device``, 8 or 4 bits and "max";
            without CUDA, or without the C++ extension, there is no such memory, and nothing is taken.
    """

    enabled: bool = True
    kv_budget: float = 0.08
    sink_rows: int = 4
    recent_rows: int = 64
    min_resident_rows: int = 256
    index_bits: IndexBits = 8
    score_operator: ScoreOperator = "max"
    lookahead: Lookahead = "fixed"
    lookahead_step: int = 1
    lookahead_context: LookaheadContext = "draft"
    refresh_step: int = 0
    refresh_lag: int = 2
    refresh_commits: float = 0.25
    on_late: LateAction = "wait"
    difference_only: bool = True
    verify_transfers: bool = False
    page_size: int = 0
    host_memory_bytes: int = 0
    prefix_sharing: bool = True
    transfer: TransferMode = "auto"
    num_threads: int = 0
    scan_on_device: bool = True
    index_device_bytes: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        check(0.0 < self.kv_budget <= 1.0, "kv_budget", self.kv_budget, "use a share in (0, 1], such as 0.08")
        check(self.sink_rows >= 0, "sink_rows", self.sink_rows, "use 0 or more, such as 4")
        check(self.recent_rows >= 1, "recent_rows", self.recent_rows, "use at least one block, such as 64")
        check(
            self.min_resident_rows >= 1,
            "min_resident_rows",
            self.min_resident_rows,
            "use at least 1, such as 256",
        )
        check(self.index_bits in (16, 8, 4, 1), "index_bits", self.index_bits, "use 16, 8, 4 or 1")
        check(
            self.score_operator in ("max", "sum"), "score_operator", self.score_operator, "use 'max' or 'sum'"
        )
        check(self.lookahead in ("fixed", "late"), "lookahead", self.lookahead, "use 'fixed' or 'late'")
        check(self.lookahead_step >= 1, "lookahead_step", self.lookahead_step, "use 1 or more")
        check(
            self.lookahead_context in ("draft", "block"),
            "lookahead_context",
            self.lookahead_context,
            "use 'draft' or 'block'",
        )
        check(self.refresh_step >= 0, "refresh_step", self.refresh_step, "use 0 for never, or 1 or more")
        check(self.refresh_lag >= 1, "refresh_lag", self.refresh_lag, "use 1 or more")
        check(
            0.0 <= self.refresh_commits <= 1.0,
            "refresh_commits",
            self.refresh_commits,
            "use a share in (0, 1], such as 0.25, or 0 for never",
        )
        check(self.on_late in ("wait", "proceed"), "on_late", self.on_late, "use 'wait' or 'proceed'")
        check(
            self.page_size >= 0, "page_size", self.page_size, "use 0 (automatic) or a multiple of the block"
        )
        check(
            self.host_memory_bytes >= 0,
            "host_memory_bytes",
            self.host_memory_bytes,
            "use 0 (automatic) or a size",
        )
        check(
            self.transfer in ("auto", "zero_copy", "staged"),
            "transfer",
            self.transfer,
            "use 'auto', 'zero_copy' or 'staged'",
        )
        check(self.num_threads >= 0, "num_threads", self.num_threads, "use 0 for all cores")
        check(
            self.index_device_bytes >= 0,
            "index_device_bytes",
            self.index_device_bytes,
            "use 0 (none) or a size",
        )
        check(
            self.index_device_bytes == 0
            or (self.scan_on_device and self.index_bits in (8, 4) and self.score_operator == "max"),
            "index_device_bytes",
            self.index_device_bytes,
            "use 0, or scan_on_device=True with index_bits 8 or 4 and score_operator='max'",
        )

    @property
    def refreshes(self) -> bool:
        """Whether rows of a block may arrive within it."""
        return self.refresh_step > 0 or self.refresh_commits > 0

    def check_steps(self, steps: int) -> None:
        """Hold a refresh to a block of ``steps`` steps: the look-ahead needs one after it.

        Raises:
            InvalidOption: there is none.
        """
        first = self.refresh_step + self.refresh_lag
        if self.enabled and self.refresh_step and first >= steps:
            raise InvalidOption(
                f"refresh_step={self.refresh_step} and refresh_lag={self.refresh_lag} leave no step for the "
                f"look-ahead in a block of {steps} steps",
                f"use a sum of at most {steps - 1}, or refresh_step=0"
                if steps > 2
                else "use refresh_step=0, or more denoising steps",
                "denoising_steps",
            )

    def resident_rows(self, prefix_rows: int) -> int:
        """Rows a KV head keeps resident for a prefix of ``prefix_rows`` positions.

        Grows by at most one per position, so a block's own rows always find room.
        """
        wanted = math.ceil(prefix_rows * self.kv_budget)
        return min(prefix_rows, max(wanted, self.min_resident_rows, self.sink_rows + self.recent_rows))


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Args:
        max_num_seqs: requests that decode at the same time.
        max_model_len: positions a request may use (prompt + output), 0 for the model's limit; more
            than that is refused.
        prefill_chunk: positions a prefill unit covers, rounded down to whole blocks. Shared prefixes are cut
            alike, so it is one number for all prompts; a smaller one holds running answers up less.
        tokens_per_step: prompt tokens that run between two decode steps, together with the positions of the
            blocks that decode; what is left is carried over. Attention to a long context counts as more
            tokens. 0 for the blocks of ``max_num_seqs`` requests and 512 prompt tokens. A smaller budget
            holds running answers up less, a larger one prefills faster beside them.
        cuda_graphs: record each shape of a step as a CUDA graph and replay it; False launches its kernels one
            by one (to debug, or to save the memory of the recordings). Has no effect on a CPU.
    """

    max_num_seqs: int = 8
    max_model_len: int = 0
    prefill_chunk: int = 2048
    tokens_per_step: int = 0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        check_kinds(self)
        check(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "use 1 or more")
        check(self.max_model_len >= 0, "max_model_len", self.max_model_len, "use 0 for the model's limit")
        check(self.prefill_chunk >= 64, "prefill_chunk", self.prefill_chunk, "use 64 or more, such as 2048")
        check(self.tokens_per_step >= 0, "tokens_per_step", self.tokens_per_step, "use 0 (automatic) or more")

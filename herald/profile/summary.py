"""What the spans of a run add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from herald.engine.trace import Span, busy_seconds, overlap_seconds
from herald.profile.kernels import KernelTimes
from herald.profile.tracks import forwards

HIDDEN_WORK = {"selection", "transfer"}


@dataclass(frozen=True)
class Overlap:
    """Seconds of each kind of work; what several spans do at the same time counts once.

    Attributes:
        under_denoising_seconds: of selections and transfers, what ran beside a forward.
        overlap_ratio: that over all of their time; 0 when there was none.
    """

    forward_seconds: float
    prefill_seconds: float
    selection_seconds: float
    transfer_seconds: float
    selection_and_transfer_seconds: float
    under_denoising_seconds: float
    overlap_ratio: float


@dataclass(frozen=True)
class BlockTimes:
    """One block of one request. A forward that other requests share counts in full.

    Attributes:
        steps: denoising steps; step 0 of a request's first block runs in its prefill and has no forward.
        denoise_seconds: its forwards.
        selection_seconds, transfer_seconds: of the selection that was made for it.
        exposed_seconds: waits at its begin, a boundary forward counted in.
    """

    request_id: str
    block: int
    steps: int
    denoise_seconds: float
    selection_seconds: float
    transfer_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Summary:
    """A whole run. Rates in 1e9 bytes a second, 0 where nothing was measured.

    Attributes:
        blocks: by request and position.
        median: of each time and of the steps over the blocks.
        decode_seconds: on the clock, first forward to last; what others prefilled meanwhile is left out.
        compute_busy_share: forward seconds / decode seconds.
        kernel_busy_share: share of the time in which a kernel ran, as the device recorded it over some blocks
            of their own; None on a CPU.
        kernels_per_step: kernels of those blocks / their steps; None on a CPU.
        forwards: forwards of the model, those at boundaries included.
        forwards_per_step: forwards / forwards that denoised; 1 without boundary forwards.
        bytes_moved: rows that selections brought to the device.
        bytes_kept: selected rows that were resident already and did not travel.
        bytes_written_back: prompt and finished blocks, to the host pool.
        resident_bytes: device bytes of all resident sets and their staging.
        index_bytes_scanned: codes, scales and means that selections read.
    """

    blocks: tuple[BlockTimes, ...]
    median: dict[str, float]
    overlap: Overlap
    decode_seconds: float
    compute_busy_share: float
    kernel_busy_share: float | None
    kernels_per_step: float | None
    forwards: int
    forwards_per_step: float
    bytes_moved: int
    bytes_kept: int
    bytes_written_back: int
    resident_bytes: int
    index_bytes_scanned: int
    selection_gb_per_second: float
    copy_gb_per_second: float
    write_back_gb_per_second: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    spans: Iterable[Span], row_bytes: int, resident_bytes: int, kernels: tuple[KernelTimes, int] | None = None
) -> Summary:
    """Add up a run.

    Args:
        kernels: what the device recorded over some steps, and how many.
        row_bytes: bytes of one row of the KV cache.
        resident_bytes: see `Summary`.
    """
    spans = list(spans)
    times = overlap(spans)
    blocks = block_times(spans)
    decode = _decode_seconds(spans)
    runs = forwards(spans)
    steps = sum(any(span.step >= 0 for span in run) for run in runs)
    moved, scanned, written = (_bytes(spans, kind) for kind in ("transfer", "selection", "write_back"))
    selected_rows = sum(span.rows for span in spans if span.kind == "selection")
    return Summary(
        blocks=tuple(blocks),
        median=_medians(blocks),
        overlap=times,
        decode_seconds=decode,
        compute_busy_share=_ratio(times.forward_seconds, decode),
        kernel_busy_share=kernels[0].busy_share if kernels else None,
        kernels_per_step=_ratio(kernels[0].count, kernels[1]) if kernels else None,
        forwards=len(runs),
        forwards_per_step=_ratio(len(runs), steps),
        bytes_moved=moved,
        bytes_kept=max(selected_rows * row_bytes - moved, 0),
        bytes_written_back=written,
        resident_bytes=resident_bytes,
        index_bytes_scanned=scanned,
        selection_gb_per_second=_ratio(scanned / 1e9, times.selection_seconds),
        copy_gb_per_second=_ratio(moved / 1e9, times.transfer_seconds),
        write_back_gb_per_second=_ratio(written / 1e9, busy_seconds(spans, {"write_back"})),
    )


def overlap(spans: Iterable[Span]) -> Overlap:
    """Seconds of denoising, of selection and transfer, and of both at once."""
    spans = list(spans)
    hidden = overlap_seconds(spans, HIDDEN_WORK)
    busy = busy_seconds(spans, HIDDEN_WORK)
    return Overlap(
        forward_seconds=busy_seconds(spans, {"forward"}),
        prefill_seconds=busy_seconds(spans, {"prefill"}),
        selection_seconds=busy_seconds(spans, {"selection"}),
        transfer_seconds=busy_seconds(spans, {"transfer"}),
        selection_and_transfer_seconds=busy,
        under_denoising_seconds=hidden,
        overlap_ratio=_ratio(hidden, busy),
    )


def block_times(spans: Iterable[Span]) -> list[BlockTimes]:
    """Every block that had a step of its own, by request and position."""
    by_block: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.block >= 0:
            by_block.setdefault((span.request_id, span.block), []).append(span)
    times = []
    for (request_id, block), own in sorted(by_block.items()):
        denoising = [span for span in own if span.kind == "forward" and span.step >= 0]
        if denoising:
            times.append(
                BlockTimes(
                    request_id=request_id,
                    block=block,
                    steps=max(span.step for span in denoising) + 1,
                    denoise_seconds=sum(span.end - span.start for span in denoising),
                    selection_seconds=busy_seconds(own, {"selection"}),
                    transfer_seconds=busy_seconds(own, {"transfer"}),
                    exposed_seconds=busy_seconds(own, {"wait"}),
                )
            )
    return times


def _medians(blocks: list[BlockTimes]) -> dict[str, float]:
    fields = ("steps", "denoise_seconds", "selection_seconds", "transfer_seconds", "exposed_seconds")
    return {field: median(getattr(block, field) for block in blocks) if blocks else 0.0 for field in fields}


def _decode_seconds(spans: list[Span]) -> float:
    decoding = [span for span in spans if span.kind in ("forward", "wait")]
    if not decoding:
        return 0.0
    first, last = min(span.start for span in decoding), max(span.end for span in decoding)
    window = [Span("forward", first, last)]
    prefills = [span for span in spans if span.kind == "prefill"]
    return last - first - overlap_seconds(window + prefills, {"prefill"})


def _bytes(spans: list[Span], kind: str) -> int:
    return sum(span.bytes for span in spans if span.kind == kind)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

"""The picture: some blocks of one request, a bar for each piece of work. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from herald.engine.trace import Span
from herald.profile.flows import flows
from herald.profile.tracks import COMPUTE, GATHER, LOOKAHEAD, SELECTION, TRACKS, Slice, slices

BLOCKS = 3
# Distinct also without colour vision (Okabe and Ito, 2008). A block and what is done for it share one.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_NO_BLOCK = "#BBBBBB"
_BAR = 0.62  # of the distance between two tracks


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_timeline(path: Path, spans: Iterable[Span], num_blocks: int = BLOCKS) -> bool:
    """Draw ``num_blocks`` blocks from the middle of the first request that has most.

    Returns:
        False when no block was denoised: there is nothing to draw.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    spans = list(spans)
    request_id, blocks = middle_blocks(spans, num_blocks)
    if not blocks:
        return False
    starts = {
        block: min(
            span.start
            for span in spans
            if _is_of(span, request_id, block) and span.kind in ("forward", "wait")
        )
        for block in blocks
    }
    begin = starts[blocks[0]]
    end = max(span.end for span in spans if _is_of(span, request_id, blocks[-1]) and span.kind == "forward")
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    axes = figure.subplots()
    for bar in slices(spans):
        if bar.end > begin and bar.start < end:
            _draw_bar(axes, bar, request_id, begin)
    _draw_arrows(axes, spans, request_id, begin, end)
    for block, start in starts.items():
        at = 1e3 * (start - begin)
        axes.axvline(at, color="#666666", linewidth=0.8, linestyle=":")
        axes.text(at, 1.01, f" block {block}", transform=axes.get_xaxis_transform(), fontsize=9)
    axes.set_yticks(range(len(TRACKS)), TRACKS)
    axes.set_ylim(len(TRACKS) - 0.4, -0.6)
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.set_xlabel(f"ms; {request_id}: one colour for a block and what was done for it (grey: others)")
    figure.savefig(path, dpi=130)
    return True


def middle_blocks(spans: Iterable[Span], count: int) -> tuple[str, list[int]]:
    """A request and ``count`` consecutive blocks from its middle, fewer when it has fewer."""
    found: dict[str, set[int]] = {}
    for span in spans:
        if span.kind == "forward" and span.step >= 0:
            found.setdefault(span.request_id, set()).add(span.block)
    if not found:
        return "", []
    request_id = max(found, key=lambda name: len(found[name]))
    blocks = sorted(found[request_id])
    first = (len(blocks) - min(count, len(blocks)) + 1) // 2
    return request_id, blocks[first : first + count]


def _is_of(span: Span, request_id: str, block: int) -> bool:
    return span.request_id == request_id and span.block == block


def _draw_bar(axes: Any, bar: Slice, request_id: str, begin: float) -> None:
    own = [span for span in bar.spans if span.request_id == request_id]
    # A look-ahead is for the block after its step's.
    block = own[0].block + (bar.track == LOOKAHEAD) if own and own[0].block >= 0 else -1
    colour = _NO_BLOCK if block < 0 else _COLOURS[block % len(_COLOURS)]
    middle = TRACKS.index(bar.track)
    # The edge keeps a bar visible that is narrower than a pixel, and apart from the next one.
    axes.broken_barh(
        [(1e3 * (bar.start - begin), 1e3 * (bar.end - bar.start))],
        (middle - _BAR / 2, _BAR),
        facecolor=colour,
        edgecolor="white" if bar.track == COMPUTE else colour,
        linewidth=0.6,
    )


def _draw_arrows(axes: Any, spans: list[Span], request_id: str, begin: float, end: float) -> None:
    """From a selection through its copy to the forward that used it, those that lie inside the picture."""
    for flow in flows(spans):
        stops = [(SELECTION, flow.selection), (COMPUTE, flow.forward)]
        if flow.transfer is not None:
            stops.insert(1, (GATHER, flow.transfer))
        inside = begin <= flow.selection.start and flow.forward.start < end
        if flow.selection.request_id != request_id or not inside:
            continue
        for (upper, before), (lower, after) in pairwise(stops):
            tail = (1e3 * (before.end - begin), TRACKS.index(upper))
            head = (1e3 * (after.start - begin), TRACKS.index(lower))
            style = {"arrowstyle": "-|>", "color": "black", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=head, xytext=tail, arrowprops=style)

"""Which positions of a prompt are computed together.

Products of other shapes round otherwise, so a row's bits depend on the piece it is computed in. Pieces
depend on positions alone, but for those of a prompt's last chunk: rows of a prefix that two prompts share,
and cut alike, are bit for bit those that each would have computed itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

# Whole chunks are one piece. The last, shorter one is cut into pieces of a quarter, so that prompts of nearly
# one length agree on all but the last of them.
TAIL_SHARE = 4


@dataclass(frozen=True)
class PrefillPlan:
    """Chunks of ``step`` positions, pieces of ``tail`` in one that is not whole; both multiples of a page."""

    step: int
    tail: int

    @classmethod
    def of(cls, chunk: int, unit: int) -> PrefillPlan:
        """For chunks of about ``chunk`` positions, all of whose edges are multiples of ``unit``."""
        step = max(chunk // unit, 1) * unit
        return cls(step, max(step // TAIL_SHARE // unit, 1) * unit)

    def starts(self, first: int, prefix: int) -> list[int]:
        """First positions of the chunks of ``[first, prefix)``; ``[first]`` where that is empty."""
        return [first, *range((first // self.step + 1) * self.step, prefix, self.step)]

    def end(self, start: int, prefix: int) -> int:
        """Where the chunk of ``start`` ends."""
        return min((start // self.step + 1) * self.step, prefix)

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Pieces of a chunk, or of what is left of it: ``[(first, last + 1)]``; none where it is empty."""
        if start == end:
            return []
        if end % self.step == 0:
            return [(start, end)]
        edges = [start, *range((start // self.tail + 1) * self.tail, end, self.tail), end]
        return list(pairwise(edges))

    def page_pieces(self, first: int, prefix: int, page_size: int) -> tuple[list[int], list[bool]]:
        """Of the whole pages of ``[first, prefix)``: lengths of their pieces, whether one ends with them.

        Args:
            first: a multiple of ``page_size``.
        """
        lengths: list[int] = []
        ends: list[bool] = []
        for start in self.starts(first, prefix):
            for begin, end in self.pieces(start, self.end(start, prefix)):
                pages = end // page_size - begin // page_size
                lengths += [end - begin] * pages
                ends += [page == pages - 1 and end % page_size == 0 for page in range(pages)]
        return lengths, ends

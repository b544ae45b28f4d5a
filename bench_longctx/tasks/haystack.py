"""Filler text for documents: slices of a corpus that begin and end at sentence boundaries."""

from __future__ import annotations

import lzma
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELDOUT = Path(__file__).parent / "haystack_heldout.txt.xz"
_SENTENCE_END = re.compile(rb"(?:[.!?][\"')]*[ \n]+|\n+)(?=[\"'(A-Z])")


@dataclass(frozen=True)
class Haystack:
    """A corpus in UTF-8 with the offsets [n] int64 at which its sentences begin."""

    text: bytes
    starts: np.ndarray

    @classmethod
    def load(cls, path: Path | str = HELDOUT) -> Haystack:
        """Read an .xz text file; without a path, the held-out excerpt that lies beside this module."""
        return cls.from_bytes(lzma.decompress(Path(path).read_bytes()))

    @classmethod
    def from_bytes(cls, text: bytes) -> Haystack:
        """Find the sentences of a text. Raises ValueError if there are fewer than ten."""
        starts = np.array([0] + [m.end() for m in _SENTENCE_END.finditer(text)] + [len(text)], dtype=np.int64)
        if len(starts) < 10:
            raise ValueError(
                f"a haystack of {len(text)} bytes has {len(starts) - 1} sentences; at least 10 are needed"
            )
        return cls(text, starts)

    def sentences(self, size: int, rng: random.Random) -> list[bytes]:
        """Consecutive sentences, trailing white space kept, of at most `size` bytes in all.

        A text longer than the corpus wraps around. The result may be shorter by part of a sentence; a
        sentence longer than half of `size` is skipped.
        """
        at = rng.randrange(len(self.starts) - 1)
        out: list[bytes] = []
        skipped = 0
        while size > 24 and skipped < 40:
            piece = self.text[self.starts[at] : self.starts[at + 1]]
            at = (at + 1) % (len(self.starts) - 1)
            if len(piece) > size:
                skipped += 1
                continue
            out.append(piece if piece.endswith((b" ", b"\n")) else piece + b"\n")
            size -= len(out[-1])
        return out

"""Text of a growing token sequence, in pieces that are never taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# what a decoder shows for bytes that are no UTF-8 (yet): one for the unfinished character or one for
# each of its bytes, of which there are at most three
REPLACEMENT = "\ufffd"
MAX_UNFINISHED = 3


class IncrementalDecoder:
    """Decodes tokens as they come; the pieces joined are the text of all of them.

    With a byte-level vocabulary the last token may end inside a character. A decoder shows such a tail
    as U+FFFD, which is held back until the character is complete or `finish` is called.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # the window starts one settled piece early: some vocabularies drop the space of a first token
        self._window = 0
        self._settled = 0
        self._emitted = 0  # characters of the window's text already handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that ``token_ids`` add for certain; may be empty."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids[self._window :])
        unfinished = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)
        piece = text[self._emitted : len(text) - unfinished]
        if unfinished:
            self._emitted += len(piece)
        elif piece:
            self._window, self._settled = self._settled, len(self._ids)
            self._emitted = len(self._decode(self._ids[self._window : self._settled]))
        return piece

    def finish(self) -> str:
        """The held back tail, once no more tokens come."""
        piece = self._decode(self._ids[self._window :])[self._emitted :]
        self._emitted += len(piece)
        return piece

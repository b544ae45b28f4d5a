"""Where a request's output ends: end-of-sequence tokens, stop strings, ``max_tokens``."""

from __future__ import annotations

from collections.abc import Sequence

from herald.config import check
from herald.decode.detokenize import Decode, IncrementalDecoder
from herald.outputs import FinishReason
from herald.sampling_params import SamplingParams


class StopChecker:
    """Takes a request's committed tokens in order and says when its output is complete.

    * An end-of-sequence token is kept in `token_ids` and adds nothing to `text`.
    * A stop string cuts `text` before it, and `token_ids` after the token that completes it; it may
      span tokens and blocks. When one token completes several, the one that starts first counts.
    * ``max_tokens`` cuts both; the token that reaches it may still stop for the reasons above.

    Args:
        params: ``stop``, ``max_tokens`` and ``ignore_eos`` are read.
        eos_token_ids: any of them ends the output.
        decode: token ids to text; None leaves `text` empty and allows no stop strings.

    Attributes:
        token_ids: output so far, cut.
        finish_reason: None while the output goes on.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], decode: Decode | None = None
    ) -> None:
        self._stop = tuple(params.stop)
        check(
            decode is not None or not self._stop,
            "stop",
            self._stop,
            "stop strings need a tokenizer: use a model folder with one, or stop=()",
        )
        self._max_tokens = params.max_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._decoder = IncrementalDecoder(decode) if decode is not None else None
        self._text = ""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """Output text so far. It only grows: what may turn into a stop string is held back."""
        if self.finish_reason is not None:
            return self._text
        return self._text[: len(self._text) - self._held()]

    def append(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Add the next tokens; those after the cut are dropped.

        Returns:
            `finish_reason`. Once it is set, further tokens change nothing.
        """
        pending: list[int] = []
        for token in token_ids:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            if token in self._eos:
                self._flush(pending)
                self._finish("stop")
                break
            pending.append(token)
            if self._stop:
                # token by token, to know which one completes a stop string
                self._flush(pending)
            if self.finish_reason is None and len(self.token_ids) >= self._max_tokens:
                self._flush(pending)
                self._finish("length")
        self._flush(pending)
        return self.finish_reason

    def _flush(self, pending: list[int]) -> None:
        """Turn ``pending`` tokens into text and look for stop strings in what is new."""
        if pending and self._decoder is not None:
            self._extend(self._decoder.push(pending))
        pending.clear()

    def _finish(self, reason: FinishReason) -> None:
        if self._decoder is not None:
            self._extend(self._decoder.finish())
        self.finish_reason = self.finish_reason or reason

    def _extend(self, piece: str) -> None:
        if self.finish_reason is not None:
            return
        known = len(self._text)
        self._text += piece
        starts = (
            [self._text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop] if piece else []
        )
        found = [start for start in starts if start >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.finish_reason = "stop"

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0

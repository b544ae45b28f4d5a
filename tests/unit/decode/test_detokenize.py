"""Text in pieces that are never taken back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from herald.decode import IncrementalDecoder

TEXT = "Grüße, мир! 数据 😀👩‍🔬 e\u0301 end"


def utf8(token_ids: Sequence[int]) -> str:
    """A byte a token, as the smallest byte-level vocabulary has it."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def byte_fallback(token_ids: Sequence[int]) -> str:
    """The same, but an unfinished character shows one U+FFFD a byte."""
    raw = bytes(token_ids)
    end = len(raw)
    while end > len(raw) - 4 and end > 0:
        try:
            return raw[:end].decode() + "\ufffd" * (len(raw) - end)
        except UnicodeDecodeError:
            end -= 1
    return utf8(token_ids)


def words(token_ids: Sequence[int]) -> str:
    """Words that start with a space, which the first of a text loses."""
    return "".join(f" w{token}" for token in token_ids)[1:]


@pytest.mark.parametrize("decode", [utf8, byte_fallback])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_characters_are_whole(decode: object, size: int) -> None:
    assert callable(decode)
    decoder, raw = IncrementalDecoder(decode), TEXT.encode()
    pieces = [decoder.push(raw[start : start + size]) for start in range(0, len(raw), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TEXT
    assert decoder.finish() == ""


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_unfinished_tail_appears_at_the_end_only(kept: int) -> None:
    decoder = IncrementalDecoder(utf8)
    assert decoder.push(b"ok " + "😀".encode()[:kept]) == "ok "
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


def test_tail_is_finished_by_the_next_piece() -> None:
    decoder = IncrementalDecoder(utf8)
    first, second = "é".encode()
    assert decoder.push([ord("a"), first]) == "a"
    assert decoder.push([second, ord("b")]) == "éb"


def test_broken_bytes_inside_the_text_are_shown() -> None:
    decoder = IncrementalDecoder(utf8)
    assert decoder.push(b"a\xff") == "a"
    assert decoder.push(b"b") == "\ufffdb"


def test_a_run_of_broken_bytes_is_not_held_for_ever() -> None:
    decoder = IncrementalDecoder(utf8)
    shown = "".join(decoder.push([0xFF]) for _ in range(50))
    assert shown == "\ufffd" * 47
    assert shown + decoder.finish() == "\ufffd" * 50


def test_spaces_between_pieces_survive() -> None:
    decoder = IncrementalDecoder(words)
    pieces = [decoder.push([token]) for token in range(5)]
    assert pieces == ["w0", " w1", " w2", " w3", " w4"]


def test_random_bytes_in_random_pieces_join_to_the_whole() -> None:
    source = random.Random(0)
    for _ in range(200):
        raw = bytes(source.choices([*TEXT.encode(), 0xFF, 0xC3, 0xF0], k=30))
        decoder, shown, start = IncrementalDecoder(utf8), "", 0
        while start < len(raw):
            size = source.randint(1, 6)
            shown += decoder.push(raw[start : start + size])
            start += size
        assert shown + decoder.finish() == utf8(raw)


def test_window_stays_short() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return utf8(token_ids)

    decoder = IncrementalDecoder(decode)
    for byte in (TEXT * 20).encode():
        decoder.push([byte])
    assert longest < 10

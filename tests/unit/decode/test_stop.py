"""Where an output ends: EOS, stop strings over tokens and blocks, max_tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from herald.decode import StopChecker
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams

EOS = 0


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")


def pairs(token_ids: Sequence[int]) -> str:
    """Two letters a token: stop strings begin and end inside tokens."""
    return "".join(chr(97 + token // 26) + chr(97 + token % 26) for token in token_ids)


def checker(max_tokens: int = 1000, ignore_eos: bool = False, stop: Sequence[str] = ()) -> StopChecker:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop=tuple(stop))
    return StopChecker(params, (EOS, 1), decode)


def run(check: StopChecker, text: str, block: int = 4) -> list[str]:
    """Feed ``text`` in blocks; the texts shown after each."""
    raw = text.encode()
    shown = []
    for start in range(0, len(raw), block):
        reason = check.append(raw[start : start + block])
        assert reason == check.finish_reason
        shown.append(check.text)
        if reason:
            break
    return shown


def test_goes_on_without_a_reason() -> None:
    check = checker()
    assert run(check, "hello world") == ["hell", "hello wo", "hello world"]
    assert check.finish_reason is None and bytes(check.token_ids) == b"hello world"


def test_eos_is_kept_in_ids_and_not_in_text() -> None:
    check = checker()
    assert check.append([*b"ab", EOS, *b"cd"]) == "stop"
    assert check.token_ids == [*b"ab", EOS] and check.text == "ab"


def test_any_of_the_end_tokens() -> None:
    check = checker()
    assert check.append([*b"abc", 1, EOS]) == "stop" and check.token_ids == [*b"abc", 1]


def test_ignored_eos_is_an_ordinary_token() -> None:
    check = checker(max_tokens=4, ignore_eos=True)
    assert check.append([*b"ab", EOS, *b"cd"]) == "length"
    assert check.token_ids == [*b"ab", EOS, ord("c")] and check.text == "ab\0c"


@pytest.mark.parametrize("block", [1, 3, 4, 50])
def test_max_tokens_cuts(block: int) -> None:
    check = checker(max_tokens=6)
    run(check, "hello world", block)
    assert check.finish_reason == "length"
    assert check.text == "hello " and bytes(check.token_ids) == b"hello "


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    check = checker(max_tokens=3)
    assert check.append([*b"ab", EOS]) == "stop"


def test_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    check = checker(max_tokens=4, stop=["cd"])
    assert check.append(b"abcdef") == "stop" and check.text == "ab"


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 50])
def test_stop_string_may_span_blocks(block: int) -> None:
    check = checker(stop=["STOP"])
    shown = run(check, "abcSTOPdef", block)
    assert check.finish_reason == "stop"
    assert check.text == "abc" and bytes(check.token_ids) == b"abcSTOP"
    assert all("abc".startswith(text) for text in shown)


def test_stop_string_ends_inside_a_token() -> None:
    check = StopChecker(SamplingParams(stop=("cde",)), (), pairs)
    ab, cd, ef, gh = (
        sum(26 ** (1 - i) * (ord(c) - 97) for i, c in enumerate(p)) for p in ("ab", "cd", "ef", "gh")
    )
    assert check.append([ab, cd, ef, gh]) == "stop"
    assert check.text == "ab" and check.token_ids == [ab, cd, ef]


def test_first_completed_stop_string_counts() -> None:
    check = checker(stop=["zz", "world", "lo"])
    run(check, "hello world zz", 50)
    assert check.text == "hel" and bytes(check.token_ids) == b"hello"


def test_one_token_completes_two_stop_strings() -> None:
    check = checker(stop=["o", "llo"])
    run(check, "hello world", 50)
    assert check.text == "he"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    check = checker(stop=["<end>"])
    check.append(b"a<en")
    assert check.text == "a"
    check.append(b"t")
    assert check.text == "a<ent"
    check.append(b"<e")
    assert check.text == "a<ent"


def test_held_back_text_is_given_at_the_end() -> None:
    for ending in ([EOS], []):
        check = checker(max_tokens=4, stop=["<end>"])
        check.append([*b"abc"[: 3 - len(ending)], ord("<"), *ending])
        assert check.finish_reason == ("stop" if ending else "length")
        assert check.text == ("ab<" if ending else "abc<")


def test_stop_string_of_many_bytes() -> None:
    check = checker(stop=["。"])
    shown = run(check, "数据。更多", 2)
    assert check.text == "数据" and check.token_ids == list("数据。".encode())
    assert not any("\ufffd" in text for text in shown)


def test_unfinished_character_at_the_cut() -> None:
    check = checker(max_tokens=4)
    assert check.append("ab😀".encode()) == "length"
    assert check.text == "ab\ufffd"


def test_nothing_changes_after_the_end() -> None:
    check = checker(stop=["b"])
    check.append(b"abc")
    assert check.append(b"def") == "stop"
    assert check.text == "a" and bytes(check.token_ids) == b"ab"


def test_without_a_tokenizer() -> None:
    check = StopChecker(SamplingParams(max_tokens=3), (EOS,))
    assert check.append([5, 6, 7, 8]) == "length"
    assert check.token_ids == [5, 6, 7] and check.text == ""
    with pytest.raises(InvalidOption, match=r"stop=.*tokenizer"):
        StopChecker(SamplingParams(stop="x"), (EOS,))


def test_shown_text_only_grows_and_blocks_do_not_matter() -> None:
    source = random.Random(1)
    for _ in range(200):
        text = "".join(source.choices("abc", k=30))
        stop = ["".join(source.choices("abc", k=source.randint(2, 5))) for _ in range(2)]
        whole, pieces = checker(max_tokens=25, stop=stop), checker(max_tokens=25, stop=stop)
        run(whole, text, 100)
        shown = run(pieces, text, source.randint(1, 7))
        assert (whole.text, whole.token_ids) == (pieces.text, pieces.token_ids)
        assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
        found = [text.find(s) + len(s) for s in stop if s in text[:25]]
        assert len(whole.token_ids) == min([*found, 25])
        assert not any(s in whole.text for s in stop)

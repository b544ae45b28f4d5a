from __future__ import annotations

import io
from pathlib import Path

import pytest

from herald.cli.prompts import collect_prompts
from herald.errors import UsageError


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def write(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def test_prompts_alone_are_kept_in_order() -> None:
    assert collect_prompts(["b", "a\n"], []) == ["b", "a\n"]


def test_each_file_alone_is_a_prompt_without_its_last_newline(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "one", b"x\n\n"),
        write(tmp_path, "two", b"y\r\n"),
        write(tmp_path, "three", b"z"),
    ]
    assert collect_prompts([], files) == ["x\n", "y", "z"]


def test_files_stand_before_each_prompt(tmp_path: Path) -> None:
    files = [write(tmp_path, "one", b"first\n"), write(tmp_path, "two", "zw\u00f6lf".encode())]
    assert collect_prompts(["p", "\nq"], files) == ["first\nzw\u00f6lf\np", "first\nzw\u00f6lf\n\nq"]


def test_stdin_is_read_and_a_byte_order_mark_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"\xef\xbb\xbfpiped\n"))
    assert collect_prompts(["q"], ["-"]) == ["piped\nq"]


def test_nothing_given() -> None:
    with pytest.raises(UsageError, match="no prompt was given; add --prompt"):
        collect_prompts([], [])


def test_stdin_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        collect_prompts([], ["-", "-"])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'.*absent' does not exist"):
        collect_prompts([], [str(tmp_path / "absent")])


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        collect_prompts([], [str(tmp_path)])


def test_a_path_through_a_file_is_a_usage_error(tmp_path: Path) -> None:
    file = write(tmp_path, "file", b"x")
    with pytest.raises(UsageError, match="cannot be read: Not a directory"):
        collect_prompts([], [f"{file}/inner"])


def test_undecodable_file_names_the_byte(tmp_path: Path) -> None:
    file = write(tmp_path, "latin", b"\xef\xbb\xbfab\xe9 cd")
    with pytest.raises(UsageError, match="not valid UTF-8 at byte 5;"):
        collect_prompts([], [file])


def test_undecodable_argument_names_the_byte() -> None:
    # How Python hands over an argument that is not UTF-8: \xe9 behind a two-byte character.
    with pytest.raises(UsageError, match="--prompt is not valid UTF-8 at byte 3;"):
        collect_prompts(["\u00e9a\udce9"], [])


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf\r\n"])
def test_empty_file(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UsageError, match="is empty"):
        collect_prompts(["q"], [write(tmp_path, "empty", data)])


def test_empty_argument() -> None:
    with pytest.raises(UsageError, match="--prompt is empty"):
        collect_prompts(["a", ""], [])

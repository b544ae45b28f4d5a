"""Prompts from the command line, files and standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from herald.errors import UsageError


def collect_prompts(prompts: Sequence[str], files: Sequence[str]) -> list[str]:
    """Every prompt to answer, in the order given.

    Args:
        prompts: texts of ``--prompt``.
        files: paths of ``--prompt-file``, ``-`` for standard input.

    Returns:
        The prompts alone, the files alone, or, with both, each prompt behind the document the files make.

    Raises:
        UsageError: nothing was given, a file cannot be read as UTF-8 text, or a prompt is empty.
    """
    if not prompts and not files:
        raise UsageError("no prompt was given", "add --prompt TEXT or --prompt-file FILE (- reads stdin)")
    if files.count("-") > 1:
        raise UsageError("--prompt-file - was given twice", "standard input can be read once only")
    for text in prompts:
        _check_argument(text)
    documents = [read_prompt(name) for name in files]
    if not prompts:
        return documents
    if not documents:
        return list(prompts)
    document = "\n".join(documents)
    return [f"{document}\n{prompt}" for prompt in prompts]


def _check_argument(text: str) -> None:
    if not text:
        raise UsageError("--prompt is empty", "give it some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        offset = len(text[: error.start].encode("utf-8"))
        raise UsageError(f"--prompt is not valid UTF-8 at byte {offset}", "convert it to UTF-8") from None


def read_prompt(name: str, option: str = "--prompt-file") -> str:
    """Text of a prompt file (``-``: standard input) without byte-order mark and last newline.

    Args:
        option: by which it was named.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    label = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{option} {name!r} does not exist", "check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{option} {name!r} is a folder", "name a text file in it") from None
    except OSError as error:
        raise UsageError(f"{option} {name!r} cannot be read: {error.strerror}", "check the path") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{label} is not valid UTF-8 at byte {error.start}", "convert it to UTF-8") from None
    text = text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
    if not text:
        raise UsageError(f"{label} is empty", "give it some text")
    return text

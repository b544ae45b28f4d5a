"""``herald prefix`` and ``herald generate --prefix`` on the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_main import run

DOCUMENT = "".join(f"Line {n} of the register holds the number {n * 7919 % 1000}.\n" for n in range(13))
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "document.txt").write_text(DOCUMENT)
    return folder


def test_a_saved_document_answers_as_its_file_does(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, saved = str(files / "document.txt"), str(files / "saved")
    code, out, err = run(capsys, "prefix", "save", saved, "--prompt-file", text, *CPU)
    assert (code, err) == (0, "") and out.startswith("saved ")
    code, out, _ = run(capsys, "prefix", "load", saved, *CPU)
    assert code == 0 and "576 tokens" in out
    question = ("--prompt", "What is the number of line 3?", "--max-tokens", "16", *CPU)
    code, answer, err = run(capsys, "generate", "--prefix", saved, *question)
    assert code == 0 and "cached tokens" in err and "512" in err
    assert run(capsys, "generate", "--prompt-file", text, *question)[:2] == (0, answer)
    code, out, err = run(capsys, "prefix", "load", saved, "--dtype", "bfloat16", *CPU)
    assert (code, out) == (2, "") and "use --dtype=float32" in err
    code, _, err = run(capsys, "generate", "--prefix", saved, "--chat", *question)
    assert code == 2 and "leave out --chat" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "--prefix", "d", "--prompt", "q", "--prompt-file", "f"), "leave --prompt-file out"),
        (("generate", "--prefix", "d"), "no prompt was given"),
        (("prefix", "save", "d"), "--prompt-file"),
        (("prefix",), "ACTION"),
        (("prefix", "load", "nowhere", *CPU), "holds no saved prefix"),
    ],
)
def test_wrong_usage(
    argv: tuple[str, ...],
    message: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    (files / "f").write_text("text")
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and err.startswith("herald: error: ") and message in err

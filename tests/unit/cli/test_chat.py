"""`herald chat`: turns, commands, and errors that do not end the conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from herald import LLM, SamplingParams
from herald.cli.main import main
from herald.llm import LLM as Loaded

OPTIONS = ["--model", "tiny", "--device", "cpu", "--max-tokens", "16", "--max-model-len", "1024"]
Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """``talk(lines, options)``: exit code, stdout and stderr of a conversation; it ends with its lines."""

    def run(lines: list[str | BaseException], *options: str) -> tuple[int, str, str]:
        left = iter(lines)

        def answer(prompt: str = "") -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", answer)
        code = main(["chat", *OPTIONS, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def answers(*conversations: list[str], system: str | None = None) -> list[str]:
    """What the model says after the last turn of each conversation, users first."""
    first = [{"role": "system", "content": system}] if system else []
    with LLM("tiny", device="cpu") as llm:
        found = []
        for turns in conversations:
            roles = ["user", "assistant"] * len(turns)
            messages = first + [{"role": r, "content": text} for r, text in zip(roles, turns)]
            ids = llm.tokenizer.chat(messages)
            (output,) = llm.generate(prompt_token_ids=ids, sampling_params=SamplingParams(max_tokens=16))
            found.append(output.outputs[0].text)
        return found


def test_turns_build_on_each_other(talk: Talk) -> None:
    (first,) = answers(["Hello"], system="Be brief.")
    (second,) = answers(["Hello", first, "And now?"], system="Be brief.")
    code, out, _ = talk(
        ["Hello", "", "And now?", "/stats", "/reset", "Hello", "/quit", "never"], "--system", "Be brief."
    )
    assert code == 0 and "never" not in out
    pieces = out.split("forgotten")
    assert first in pieces[0] and pieces[0].index(first) < pieces[0].rindex(second)
    assert first in pieces[1]


def test_a_file_goes_before_the_next_question_only(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "a document.txt"
    path.write_text("The code of the harbour is 4711.\n", "utf-8")
    question = "Question: What is the code of the harbour?"
    (expected,) = answers([f"The code of the harbour is 4711.\n{question}"])
    code, out, err = talk([f'/file "{path}"', question, "/stats"])
    assert code == 0 and expected in out and "32 tokens" in out and "rows selected" in err


def test_errors_do_not_end_it(talk: Talk) -> None:
    lines: list[str | BaseException] = [
        "/nothing",
        "/file",
        "/file /no/such/file",
        "/file -",
        "x" * 2000,
        "/stats",
        "/help",
    ]
    code, out, _ = talk(lines)
    assert code == 0
    for message in (
        "/nothing is no command", "/file is no command", "/file '/no/such/file' does not exist",
        "/file - would read the conversation",
        "limit of 1,024 positions", "nothing was answered yet", "/reset",
    ):  # fmt: skip
        assert message in out, message


def test_ctrl_c_ends_an_answer_and_then_the_conversation(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Loaded.stream
    calls = []

    def interrupted(self: LLM, *arguments: object, **options: object) -> object:
        calls.append(self)

        def states() -> object:
            inner = stream(self, *arguments, **options)  # type: ignore[arg-type]
            try:
                yield next(inner)
                if len(calls) == 1:
                    raise KeyboardInterrupt
                yield from inner
            finally:
                inner.close()  # type: ignore[attr-defined]

        return states()

    monkeypatch.setattr(Loaded, "stream", interrupted)
    code, out, _ = talk(["Hello", "Again", KeyboardInterrupt()])
    assert code == 0 and "(ended)" in out and len(calls) == 2
    assert not calls[0].engine.has_work


def test_a_model_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "golden" / "sdar_b8"
    assert main(["chat", "--model", str(folder), "--device", "cpu"]) == 2
    assert "has no chat template" in capsys.readouterr().err

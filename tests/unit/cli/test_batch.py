"""`herald generate --input`: every prompt once, also over several runs; wrong lines are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from herald import LLM, OffloadConfig, SamplingParams
from herald.cli import batch
from herald.cli.main import main

OPTIONS = ["--model", "tiny", "--device", "cpu", "--max-tokens", "12", "--quiet", "--max-model-len", "512"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and stderr."""
    code = main(["generate", *OPTIONS, *argv])
    return code, capsys.readouterr().err


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def alone(prompts: list[Any], params: list[SamplingParams]) -> list[str]:
    with LLM("tiny", device="cpu", offload=OffloadConfig()) as llm:
        ids = [
            llm.tokenizer.encode(p) if isinstance(p, str)
            else llm.tokenizer.chat(p) if isinstance(p[0], dict) else p
            for p in prompts
        ]  # fmt: skip
        outputs = llm.generate(prompt_token_ids=ids, sampling_params=params)
        return [output.outputs[0].text for output in outputs]


def test_lines_with_options_of_their_own_and_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    entries: list[dict[str, Any]] = [
        {"id": "a", "prompt": "One"},
        {"prompt": "Two", "max_tokens": 20, "ignore_eos": True},
        {"id": "c", "messages": messages, "temperature": 1.0, "seed": 4},
        {"id": "d", "prompt_token_ids": [65, 66]},
        {"id": "long", "prompt": "x" * 600},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n", "utf-8")
    files = ("--input", str(source), "--output", str(target))
    code, err = run(capsys, *files)
    assert code == 1 and "1 of 5 prompts failed" in err
    found = {entry["id"]: entry for entry in lines(target)}
    assert set(found) == {"a", "2", "c", "d", "long"}
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, seed=4),
        SamplingParams(max_tokens=12),
    ]
    expected = alone(["One", "Two", messages, [65, 66]], params)
    assert [found[name]["text"] for name in ("a", "2", "c", "d")] == expected
    assert "512" in found["long"]["error"] and found["2"]["metrics"]["output_tokens"] == 20

    # Cut off in the middle of a line, as a machine that went down leaves it.
    kept = [line for line in target.read_text("utf-8").splitlines() if '"id": "a"' not in line]
    target.write_text("\n".join(kept) + '\n{"id": "a", "te', "utf-8")
    code, err = run(capsys, *files)
    assert code == 1, "what failed is tried again"
    again = lines(target)
    assert [entry["id"] for entry in again].count("2") == 1
    assert [entry["text"] for entry in again if entry["id"] == "a"] == [expected[0]]
    assert [entry["id"] for entry in again].count("long") == 2


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = tmp_path / "in", tmp_path / "out.jsonl"
    (folder / "deep").mkdir(parents=True)
    (folder / "one.txt").write_text("One\n", "utf-8")
    (folder / "deep" / "two.md").write_text("Two", "utf-8")
    (folder / "picture.png").write_bytes(b"\xff")
    files = ("--input", str(folder), "--output", str(target), "--chat")
    assert run(capsys, *files)[0] == 0
    found = {entry["id"]: entry["text"] for entry in lines(target)}
    turns = [[{"role": "user", "content": text}] for text in ("One", "Two")]
    texts = alone(turns, [SamplingParams(max_tokens=12)] * 2)
    assert found == {"one.txt": texts[0], "deep/two.md": texts[1]}
    before = target.read_bytes()
    assert run(capsys, *files)[0] == 0 and target.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lines"),
        ("{", "line 1: no JSON"),
        ("[]", "line 1: no object"),
        ('{"id": "a"}', "line 1: one prompt is needed"),
        ('{"prompt": "a", "messages": []}', "one prompt is needed"),
        ('{"prompt": ""}', "line 1: prompt is no str, or empty"),
        ('{"prompt_token_ids": "a"}', "prompt_token_ids is no list"),
        ('{"prompt": "a"}\n{"prompt": "b", "colour": 1}', "line 2: 'colour' is not known"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens=0"),
        ('{"id": "a", "prompt": "a"}\n{"id": "a", "prompt": "b"}', "line 2: id 'a' occurs twice"),
    ],
)
def test_wrong_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text, "utf-8")
    code, err = run(capsys, "--input", str(source), "--output", str(tmp_path / "out.jsonl"))
    assert code == 2 and message in err


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.jsonl")
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other.txt"
    other.write_text("a letter\n", "utf-8")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}', "utf-8")
    for argv, message in (
        (["--input", "x"], "go together"),
        (["--input", "x", "--output", out, "--prompt", "a"], "--prompt has no meaning"),
        (["--input", "x", "--output", out, "--json"], "--json has no meaning"),
        (["--input", str(tmp_path / "nothing"), "--output", out], "cannot be read"),
        (["--input", str(tmp_path / "empty"), "--output", out], "has no prompts"),
        (["--input", str(source), "--output", str(other)], "no file of answers"),
        (["--input", str(source), "--output", str(tmp_path / "no" / "a")], "cannot be written"),
        (["--input", str(source), "--output", str(tmp_path / "empty")], "cannot be"),
    ):
        code, err = run(capsys, *argv)
        assert code == 2 and message in err, err
    assert other.read_text("utf-8") == "a letter\n"


@pytest.mark.parametrize(
    "held",
    [
        b"a letter",
        b"a letter\n",
        b'{"id": "a", "prompt": "b"}\n',  # the prompts themselves
        b'{"id": "a", "text": "b"}\nnotes',
        b'{"id": ["a"], "text": "b"}\n',
        b"[1]\n",
        b"5",
        b"\xff\xfe",
    ],
)
def test_what_is_no_file_of_answers_is_left_alone(
    held: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "mine"
    source.write_text('{"id": "a", "prompt": "a"}', "utf-8")
    target.write_bytes(held)
    code, err = run(capsys, "--input", str(source), "--output", str(target))
    assert code == 2 and "is no file of answers" in err, err
    assert target.read_bytes() == held


@pytest.mark.parametrize("cut", [1, 4, 8, 12, 20])
def test_only_a_line_that_was_cut_off_is_taken_out(cut: int, tmp_path: Path) -> None:
    line = b'{"id": "a", "text": "b"}\n'
    target = tmp_path / "out.jsonl"
    target.write_bytes(line + line.replace(b'"a"', b'"c"')[:cut])
    assert batch.answered(target) == {"a"}
    assert target.read_bytes() == line


def test_more_steps_than_positions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One"}', "utf-8")
    files = ("--input", str(source), "--output", str(target))
    code, err = run(capsys, *files, "--steps", "17")
    assert code == 2 and "--steps=17 is not valid; use at most 16, the positions of a block" in err
    assert run(capsys, *files, "--steps", "16")[0] == 0

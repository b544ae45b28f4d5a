"""The user's JSONL files: what is read, and what an error says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench_longctx.quality import files, longbench
from bench_longctx.quality.metrics import METRICS
from bench_longctx.tasks.forms import BytesForm, TokensForm
from herald.errors import UsageError


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8"
    )
    return path


def test_ruler(tmp_path: Path, tokens: TokensForm):
    line = {"index": 0, "input": "Text. What?", "outputs": ["12", "34"], "answer_prefix": " They are"}
    write(tmp_path / "niah_multivalue" / "validation.jsonl", line, line)
    write(tmp_path / "qa_1.jsonl", {"input": "Q", "outputs": ["a"]})
    assert files.find_tasks("ruler", tmp_path) == ["niah_multivalue", "qa_1"]
    (case,) = files.ruler_cases("niah_multivalue", tmp_path, 1, tokens, 4096)
    assert case.references == ("12", "34") and case.metric == "all_references" and case.max_tokens == 128
    assert tokens.tokenizer.decode(case.ids or ()) == "Text. What?\nAnswer:They are"
    (case,) = files.ruler_cases("qa_1", tmp_path, 9, tokens, 4096)
    assert case.metric == "any_reference" and case.max_tokens == 32
    (case,) = files.ruler_cases("qa_1", tmp_path, 9, BytesForm(), 4096)
    assert case.prompt == "Q" and case.ids is None
    with pytest.raises(UsageError, match="the prompt has 20 tokens, more than 10; use --lengths 20 or more"):
        files.ruler_cases("niah_multivalue", tmp_path, 1, TokensForm(tokens.tokenizer, chat=False), 10)


def longbench_line(**more: Any) -> dict[str, Any]:
    return {"input": "Who?", "context": "Long text. " * 40, "answers": ["me"], "all_classes": None, **more}


def test_longbench(tmp_path: Path, tokens: TokensForm):
    write(tmp_path / "data" / "hotpotqa.jsonl", longbench_line())
    write(tmp_path / "trec.jsonl", longbench_line(all_classes=["me", "you"], answers=["me"]))
    assert files.find_tasks("longbench", tmp_path) == ["hotpotqa", "trec"]
    (case,) = files.longbench_cases("hotpotqa", tmp_path, 1, tokens, 4096)
    assert case.metric == "qa_f1" and case.max_tokens == 32 and not case.first_line
    assert "Question: Who?" in case.prompt and longbench_line()["context"] in case.prompt
    assert tokens.tokenizer.decode(case.ids or ()).endswith("Answer:\nAnswer:")
    (case,) = files.longbench_cases("trec", tmp_path, 1, tokens, 4096)
    assert case.classes == ("me", "you") and case.first_line
    # no chat template around a data set whose prompt is examples
    assert tokens.tokenizer.decode(case.ids or ()) == case.prompt
    with pytest.raises(UsageError, match="longbench is asked in tokens"):
        files.longbench_cases("trec", tmp_path, 1, BytesForm(), 4096)


def test_longbench_loses_its_middle(tmp_path: Path, tokens: TokensForm):
    write(tmp_path / "hotpotqa.jsonl", longbench_line(context="A" * 3000))
    (case,) = files.longbench_cases("hotpotqa", tmp_path, 1, tokens, 1000)
    assert case.ids is not None and 990 <= len(case.ids) <= 1000
    assert case.prompt.startswith("Below is a number of passages") and "Question: Who?" in case.prompt


@pytest.mark.parametrize("length", [-100, 0, 5, 200])
def test_longbench_without_room(tmp_path: Path, tokens: TokensForm, length: int):
    """A cut from behind would leave a prompt of nearly its whole length."""
    write(tmp_path / "trec.jsonl", longbench_line(context="A" * 3000))
    with pytest.raises(UsageError, match=f"a length of {length} tokens leaves .*; use a longer --lengths"):
        files.longbench_cases("trec", tmp_path, 1, tokens, length)


def test_longbench_with_published_prompts(tmp_path: Path, tokens: TokensForm):
    write(tmp_path / "hotpotqa.jsonl", longbench_line(context="{braces}"))
    write(tmp_path / "dataset2prompt.json", json.dumps({"hotpotqa": "C: {context} I: {input}"}))
    (case,) = files.longbench_cases("hotpotqa", tmp_path, 1, tokens, 1000)
    assert case.prompt == "C: {braces} I: Who?"
    (tmp_path / "dataset2prompt.json").write_text("[]")
    with pytest.raises(UsageError, match="does not map data sets to prompts"):
        files.longbench_cases("hotpotqa", tmp_path, 1, tokens, 1000)


def test_every_longbench_set_can_be_asked():
    assert len(longbench.DATASETS) == 21
    for dataset in longbench.DATASETS.values():
        assert dataset.metric in METRICS and "{context}" in dataset.template


def test_own_format(tmp_path: Path, tokens: TokensForm):
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "Say a.", "answers": ["a"]},
        "",
        {"prompt": "P", "answers": ["b"], "metric": "qa_f1", "max_tokens": 7, "task": "x", "classes": ["b"]},
    )
    first, second = files.own_cases(path, 5, tokens, 100)
    assert (first.task, first.metric, first.max_tokens) == ("mine", "all_references", 128)
    assert (second.task, second.metric, second.max_tokens, second.classes) == ("x", "qa_f1", 7, ("b",))
    assert len(files.own_cases(path, 1, tokens, 100)) == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", ":1: not JSON"),
        ("[1]", ":1: not an object"),
        ({"answers": ["a"]}, ":1: 'prompt' is missing or no text"),
        ({"prompt": "p"}, ":1: 'answers' is missing, empty or no list of texts"),
        ({"prompt": "p", "answers": []}, ":1: 'answers' is missing, empty"),
        ({"prompt": "p", "answers": ["a", " "]}, ":1: an answer is blank"),
        ({"prompt": "p", "answers": ["a"], "metric": "bleu"}, ":1: metric='bleu' is not known"),
        ({"prompt": "p", "answers": ["a"], "max_tokens": 0}, ":1: max_tokens=0 is not valid"),
        ({"prompt": "p" * 200, "answers": ["a"]}, ":1: the prompt has 200 bytes, more than 100"),
        ("", "has no line"),
        ({"prompt": "", "answers": ["a"]}, ":1: 'prompt' is empty"),
        ({"prompt": "\ud800", "answers": ["a"]}, ":1: 'prompt' has a lone surrogate at character 0"),
        ({"prompt": "p", "answers": ["a", "b\ud800"]}, ":1: 'answers' has a lone surrogate at character 1"),
        ("[" * 100_000, ":1: not JSON"),
        (
            {"prompt": "p", "answers": ["a"], "answer_prefix": ""},
            ":1: 'answer_prefix' is not known; use prompt",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, line: Any, message: str):
    path = write(tmp_path / "bad.jsonl", line)
    with pytest.raises(UsageError, match=message) as caught:
        files.own_cases(path, 5, BytesForm(), 100)
    assert "\n" not in str(caught.value) and "bad.jsonl" in str(caught.value)


def test_absent_files(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be read"):
        files.own_cases(tmp_path / "none.jsonl", 5, BytesForm(), 100)
    with pytest.raises(UsageError, match="is not a folder"):
        files.find_tasks("ruler", tmp_path / "none")
    with pytest.raises(UsageError, match="holds no file of longbench"):
        files.find_tasks("longbench", tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, tokens: TokensForm):
    mark = "\ufeff"
    own, line = {"prompt": "P", "answers": ["a"]}, {"input": "P", "outputs": ["a"]}
    paths = [
        write(tmp_path / name, mark + json.dumps(it)) for name, it in (("own.jsonl", own), ("vt.jsonl", line))
    ]
    assert paths[0].read_bytes().startswith(b"\xef\xbb\xbf")
    assert files.own_cases(paths[0], 5, BytesForm(), 100)[0].prompt == "P"
    assert files.ruler_cases("vt", tmp_path, 5, BytesForm(), 100)[0].prompt == "P"
    write(tmp_path / "trec.jsonl", mark + json.dumps(longbench_line()))
    write(tmp_path / "dataset2prompt.json", mark + json.dumps({"trec": "I: {input}"}))
    assert files.longbench_cases("trec", tmp_path, 1, tokens, 1000)[0].prompt == "I: Who?"

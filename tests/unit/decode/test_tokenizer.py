"""The tokenizer of a model folder, with a byte-level vocabulary built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from herald.errors import InvalidOption, WeightsError
from herald.tokenizer import Tokenizer
from tests.support.golden import GOLDEN

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if thinking %}(think){% endif %}"
)
EOS = 256


def build(folder: Path, settings: dict[str, Any] | None = None) -> Path:
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<mask>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chat_model(folder: Path, **settings: Any) -> Tokenizer:
    return Tokenizer(build(folder, {"eos_token": "<eos>", "chat_template": TEMPLATE} | settings))


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build(tmp_path))
    text = "Grüße 😀 <eos>"
    ids = tokenizer.encode(text)
    assert ids[-1] == EOS
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "Grüße 😀 "


def test_stream_holds_unfinished_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build(tmp_path))
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in tokenizer.encode("a😀b")]
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert stream.push(tokenizer.encode("😀")[:2]) == "" and stream.finish() == "\ufffd"


@pytest.mark.parametrize("eos", ["<eos>", {"content": "<eos>", "__type": "AddedToken"}])
def test_end_token_of_the_settings(tmp_path: Path, eos: object) -> None:
    assert chat_model(tmp_path, eos_token=eos).eos_token_id == EOS


def test_chat(tmp_path: Path) -> None:
    tokenizer = chat_model(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.chat(messages)
    assert tokenizer.has_chat_template and EOS in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[user]hi<eos>[assistant]"
    assert tokenizer.decode(tokenizer.chat(messages, thinking=True)).endswith("[assistant](think)")


@pytest.mark.parametrize("where", ["file", "list"])
def test_template_may_stand_elsewhere(tmp_path: Path, where: str) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    build(tmp_path, {"chat_template": named if where == "list" else None})
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "x"}])) == "[user]x[assistant]"


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidOption, match="no chat template") as caught:
        tokenizer.chat([{"role": "user", "content": "x"}])
    assert "plain prompt" in caught.value.remedy


def test_template_refuses_messages(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no tools"):
        chat_model(tmp_path).chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.x.y }}", "{{ 'a' * 3 + 1 }}", "{% if %}"])
def test_a_template_that_fails_is_a_typed_error(tmp_path: Path, template: str) -> None:
    tokenizer = chat_model(tmp_path, chat_template=template)
    with pytest.raises(InvalidOption, match="the chat template refuses") as caught:
        tokenizer.chat([{"role": "user", "content": "long " * 10_000}])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", [None, 5, b"x", ["x"]])
def test_only_text_is_encoded(tmp_path: Path, text: Any) -> None:
    with pytest.raises(InvalidOption, match="prompt="):
        Tokenizer(build(tmp_path)).encode(text)


def test_code_beside_the_tokenizer_is_never_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_prompt(*_: object) -> str:
        raise AssertionError("a question was asked")

    monkeypatch.setattr("builtins.input", no_prompt)
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (tmp_path / "odd.py").write_text("raise AssertionError('run')")
    assert Tokenizer(build(tmp_path, settings)).encode("a") == [64]


def test_folder_without_tokenizer() -> None:
    tokenizer = Tokenizer(GOLDEN / "sdar_b4")
    assert not tokenizer.available and tokenizer.eos_token_id is None
    assert tokenizer.decode([1, 2, 3]) == "" and tokenizer.stream().push([1, 2]) == ""
    with pytest.raises(InvalidOption, match="no tokenizer"):
        tokenizer.encode("text")
    with pytest.raises(InvalidOption, match="no tokenizer"):
        tokenizer.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_a_typed_error(tmp_path: Path, name: str) -> None:
    build(tmp_path, {})
    (tmp_path / name).write_text("{")
    with pytest.raises(WeightsError, match="tokenizer in"):
        Tokenizer(tmp_path)


def test_dreams_own_class_is_read_without_its_code(tmp_path: Path) -> None:
    """Dream has vocab.json and merges.txt, and a class that is Python beside the checkpoint."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, "he", "hel"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    special = {"content": "<|endoftext|>", "special": True, "lstrip": False, "rstrip": False}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {"300": special | {"normalized": False, "single_word": False}},
        "eos_token": "<|endoftext|>",
        "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("hello é<|endoftext|>")
    assert ids[0] == vocabulary["hel"] and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "hello é"
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hello"}])) == "[hello]"

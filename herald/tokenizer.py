"""`Tokenizer`: text to token ids and back, from a model folder, without the network."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from herald.config import check
from herald.decode.detokenize import IncrementalDecoder
from herald.errors import InvalidOption, WeightsError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Classes that exist only as code beside a checkpoint, and are Qwen2's under another name.
QWEN2_COPIES = ("DreamTokenizer",)
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of a model folder.

    A folder may have none: `available` is then False, decoding gives ``""`` and everything that needs
    text refuses.

    Args:
        path: model folder.

    Raises:
        WeightsError: tokenizer files are there but cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._hf: Any = None
        if any((self.path / name).exists() for name in TOKENIZER_FILES):
            try:
                self._hf = _load(self.path)
            # each tokenizer class raises its own kind when a file is damaged
            except Exception as error:
                raise WeightsError(
                    f"the tokenizer in {self.path} cannot be read ({error})", "download tokenizer.json again"
                ) from error

    @property
    def available(self) -> bool:
        return self._hf is not None

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id if self.available else None

    @property
    def has_chat_template(self) -> bool:
        return self.available and bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``.

        Raises:
            InvalidOption: the folder has no tokenizer, or ``text`` is no string that UTF-8 can write.
        """
        check(isinstance(text, str), "prompt", text, "pass a string, or token ids as prompt_token_ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair, as JSON may spell it
            raise InvalidOption(
                f"the prompt has a lone surrogate at character {error.start}", "pass valid Unicode", "prompt"
            ) from None
        return list(self._require("encode text").encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; an unfinished character at the end shows as U+FFFD."""
        if not self.available:
            return ""
        return self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def stream(self) -> IncrementalDecoder:
        """A decoder for tokens that arrive piece by piece."""
        return IncrementalDecoder(self.decode)

    def chat(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """Prompt ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.
            template_options: passed on to the model's chat template, such as ``enable_thinking``.

        Raises:
            InvalidOption: no tokenizer, no template, or messages that the template refuses.
        """
        hf = self._require("apply a chat template")
        if not self.has_chat_template:
            raise InvalidOption(
                f"the model in {self.path} has no chat template",
                "pass a plain prompt, or use a chat model",
                "prompt",
            )
        try:
            text = hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_options
            )
        # a template is a program of the checkpoint's author: it may fail in any way
        except Exception as error:
            raise InvalidOption(
                f"the chat template refuses messages={reprlib.repr(messages)} ({error})",
                "use [{'role': 'user', 'content': 'text'}, ...]",
                "prompt",
            ) from error
        # the template writes the special tokens itself
        return self.encode(text)

    def _require(self, purpose: str) -> Any:
        if not self.available:
            raise InvalidOption(
                f"cannot {purpose}: {self.path} has no tokenizer",
                "pass token ids, or add a tokenizer.json",
                "prompt",
            )
        return self._hf


def _load(path: Path) -> Any:
    """``tokenizer.json`` as it stands where there is one, else what AutoTokenizer makes of the folder.

    The file alone gives the same ids whatever transformers knows of the class in
    ``tokenizer_config.json``, and never asks to run code that lies beside it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fast_file = path / "tokenizer.json"
    settings_file = path / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
    if not fast_file.exists():
        if settings.get("tokenizer_class") in QWEN2_COPIES:
            from transformers import Qwen2TokenizerFast

            return Qwen2TokenizerFast.from_pretrained(path, local_files_only=True)
        return AutoTokenizer.from_pretrained(
            path, use_fast=True, local_files_only=True, trust_remote_code=False
        )
    options = {
        key: _content(value) for key, value in settings.items() if key in SPECIAL_TOKENS and value is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_file=str(fast_file), chat_template=_chat_template(path, settings), **options
    )


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    template_file = path / "chat_template.jinja"
    if template_file.exists():
        return template_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template

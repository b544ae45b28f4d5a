"""The byte tokenizer of `tiny`: token ids 0 to 255 are bytes, then the special tokens."""

from __future__ import annotations

import json
from pathlib import Path

MASK, EOS, PAD = 256, 257, 258
SPECIALS = ("<|mask|>", "<|eos|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '\\n' }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\\n\\n' }}"
    "{% else %}{{ m['content'] + '\\nAnswer:' }}{% endif %}{% endfor %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]


def encode(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes."""
    return list(text.encode("utf-8"))


def decode(ids: list[int]) -> str:
    """Text of token ids up to the first end token; other special tokens are dropped."""
    ids = ids[: ids.index(EOS)] if EOS in ids else ids
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def write(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    vocabulary = {c: i for i, c in enumerate(byte_characters())}
    vocabulary |= {s: 256 + i for i, s in enumerate(SPECIALS)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": 256 + i,
            "content": s,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, s in enumerate(SPECIALS)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": added,
                "normalizer": None,
                "pre_tokenizer": level,
                "post_processor": None,
                "decoder": level,
                "model": model,
            },
            ensure_ascii=False,
        ),
        "utf-8",
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "mask_token": "<|mask|>",
                "eos_token": "<|eos|>",
                "pad_token": "<|pad|>",
                "bos_token": None,
                "unk_token": None,
                "split_special_tokens": True,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 32768,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        ),
        "utf-8",
    )

"""How a task becomes a prompt: in bytes, framed as `tiny` was trained, or in tokens of any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from herald.tokenizer import Tokenizer


@dataclass(frozen=True)
class Parts:
    """What a prompt is made of, in reading order.

    Attributes:
        instruction: what is to be done with the text that follows.
        context: the long text.
        question: what is asked.
        prefix: the words the answer begins with, put into the model's mouth.
    """

    instruction: str
    context: str
    question: str
    prefix: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, and its token ids where the text alone does not say them (chat templates)."""

    text: str
    ids: tuple[int, ...] | None = None


class PromptForm(Protocol):
    """Measures and assembles prompts."""

    unit: str

    def size(self, text: str) -> int:
        """Length of a text in the form's unit."""

    def assemble(self, parts: Parts) -> Prompt:
        """The whole prompt."""

    def length(self, prompt: Prompt) -> int:
        """Length of a prompt in the form's unit."""


class BytesForm:
    """Bytes of UTF-8 and `tiny`'s frame: context, then ``Question: ...``, then ``Answer:``.

    `tiny` writes its answers itself from the first word on, so a prefix is left out.
    """

    unit = "bytes"

    def size(self, text: str) -> int:
        return len(text.encode("utf-8"))

    def assemble(self, parts: Parts) -> Prompt:
        head = f"{parts.instruction}\n\n" if parts.instruction else ""
        return Prompt(f"{head}{parts.context}\n\nQuestion: {parts.question}\nAnswer:")

    def length(self, prompt: Prompt) -> int:
        return self.size(prompt.text)


class TokensForm:
    """Tokens of a checkpoint: instruction, context and question as one user turn of its chat template.

    The answer's prefix follows the template, where the model's own turn begins. Without a template (or with
    ``chat=False``) all of it is one plain text.

    Args:
        tokenizer: of the checkpoint.
        chat: apply the chat template where there is one.
    """

    unit = "tokens"

    def __init__(self, tokenizer: Tokenizer, chat: bool = True) -> None:
        self.tokenizer = tokenizer
        self.chat = chat and tokenizer.has_chat_template

    def size(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def assemble(self, parts: Parts) -> Prompt:
        turn = "\n".join(part for part in (parts.instruction, parts.context, parts.question) if part)
        return self.assemble_turn(turn, parts.prefix)

    def assemble_turn(self, turn: str, prefix: str = "", chat: bool = True) -> Prompt:
        """A prompt from a user turn that is ready, as published prompts are."""
        if not (self.chat and chat):
            text = f"{turn} {prefix}" if prefix else turn
            return Prompt(text, tuple(self.tokenizer.encode(text, add_special_tokens=True)))
        ids = self.tokenizer.chat([{"role": "user", "content": turn}])
        if prefix:
            ids = ids + self.tokenizer.encode(prefix)
        return Prompt(f"{turn} {prefix}" if prefix else turn, tuple(ids))

    def length(self, prompt: Prompt) -> int:
        return len(prompt.ids or ())


def largest_fit(measure: Callable[[int], int], limit: int, most: int, slack: float = 0.02) -> int:
    """The largest count whose measure does not exceed ``limit``, or one whose measure is within ``slack`` of
    it.

    Args:
        measure: length with so many units; grows with the count, about evenly.
        most: largest count there can be.

    Raises:
        ValueError: even without a unit the limit is exceeded.
    """
    low, low_size = 0, measure(0)
    base = low_size
    if base > limit:
        raise ValueError(f"a length of {limit} is too short; at least {base} is needed")
    high, guess = most + 1, min(8, most)
    for attempt in range(64):
        if high - low <= 1 or low_size >= (1 - slack) * limit:
            break
        size = measure(guess)
        if size > limit:
            high = guess
        else:
            low, low_size = guess, size
        # along the line through the first and the last point, then by halves where it is not straight
        rate = max((size - base) / guess, 1e-9)
        wanted = int((limit * (1 - slack / 2) - base) / rate) if attempt < 8 else (low + high) // 2
        guess = min(max(wanted, low + 1), high - 1)
    return low

"""Retrieval tasks over long documents: generators and scores.

Six tasks, modelled on RULER (https://arxiv.org/abs/2404.06654): `needle` (one fact in the filler), `keys`
(one of many facts is asked for), `values` (all values of one key, in document order), `queries` (two to four
facts in one question), `chain` (variables that are assigned from each other: which ones hold a value) and
`sentence` (quote the sentence that begins with or mentions some words). `make` gives one example; everything
follows from the seed of the generator that is passed in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import wording
from .document import Document, Question
from .haystack import Haystack

TASKS = ("needle", "keys", "values", "queries", "chain", "sentence")


@dataclass(frozen=True)
class Example:
    """A prompt that ends with `Answer:` (or `A:`) and the answer expected after it, without the space.

    meta: `items`, the parts of the answer; `document_bytes`, where the question begins.
    """

    prompt: str
    answer: str
    task: str
    meta: dict = field(default_factory=dict)


def make(task: str, length_bytes: int, rng: random.Random, haystack: Haystack) -> Example:
    """One example of `task` whose prompt has about `length_bytes` bytes of UTF-8 (never more).

    Raises ValueError for an unknown task or a length under 512.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; one of {', '.join(TASKS)}")
    if length_bytes < 512:
        raise ValueError(f"length_bytes={length_bytes} is too short; at least 512")
    while True:
        document = Document(rng, haystack)
        question = _plan_and_ask(task, document, length_bytes - 220)
        prompt = question and document.text + wording.frame(rng).format(q=question.text)
        if prompt and len(prompt.encode("utf-8")) <= length_bytes:
            meta = {"items": list(question.items), "document_bytes": len(document.text.encode("utf-8"))}
            return Example(prompt, question.answer, task, meta)


def _plan_and_ask(task: str, document: Document, size: int) -> Question | None:
    rng = document.rng
    target = None
    if task == "needle":
        target = document.add_single()
        count = rng.randint(0, 3)
    elif task == "keys":
        count = rng.randint(60, 100)
    elif task == "values":
        target = document.add_group(rng.randint(2, 4))
        count = rng.randint(2, 12)
    elif task == "queries":
        count = rng.randint(6, 16)
    elif task == "chain":
        target = document.add_chain(rng.randint(3, 5))
        for _ in range(rng.randint(0, 2)):
            document.add_chain(rng.randint(2, 4))
        count = rng.randint(0, 4)
    else:
        count = rng.randint(0, 6)
    while count > 0 and (document.planned_bytes < 0.7 * size):
        document.add_single()
        count -= 1
    document.render(size)
    if task in ("needle", "keys"):
        return document.ask_single(task, target)
    if task == "values":
        return document.ask_group(target)
    if task == "queries":
        return document.ask_several(rng.randint(2, min(4, len(document.singles))))
    if task == "chain":
        return document.ask_chain(target)
    return document.ask_sentence()


def completion(example: Example) -> str:
    """What a model should write after the prompt, up to its end-of-sequence token."""
    return f" {example.answer}\n"


def score(example: Example, output: str) -> tuple[bool, float]:
    """Exact match of the whole answer (white space at the ends aside), and the share of its items that occur
    at their place in the output. Text after the first line break is ignored."""
    line = output.strip().split("\n")[0].strip()
    items = example.meta["items"]
    if len(items) == 1:
        exact = line == example.answer
        return exact, float(exact)
    given = [part.strip() for part in line.split(",")]
    right = sum(a == b for a, b in zip(items, given, strict=False))
    return line == example.answer, right / len(items)

"""A case: one prompt, what is expected of its answer, and by which metric."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from bench_longctx import tasks
from bench_longctx.tasks import forms, qa, ruler, structured
from bench_longctx.tasks.haystack import Haystack
from herald.errors import InvalidOption

# What runs where no task is named: in bytes what `tiny` was trained on.
BYTE_TASKS = (*tasks.TASKS, *structured.TASKS)
TOKEN_TASKS = ruler.TASKS


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        ids: token ids of the prompt; None where ``prompt`` says them.
        references: strings the answer should have; what that means is the metric's.
        metric: a name of `metrics.METRICS`.
        max_tokens: an answer may take.
        facts: {key: value} of `json` and `pairs`.
        asked: how many of the facts are asked for.
        classes: labels there are, of classification.
        source: where the text is from, if not from the bundled haystack.
        first_line: only the first line of an answer counts (after line breaks at its begin).
    """

    task: str
    prompt: str
    references: tuple[str, ...]
    metric: str
    max_tokens: int
    ids: tuple[int, ...] | None = None
    facts: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    classes: tuple[str, ...] = ()
    source: str = ""
    first_line: bool = False


def generate(
    task: str,
    length: int,
    count: int,
    seed: int,
    form: forms.PromptForm,
    limit: int,
    max_tokens: int = 256,
    data: Path | None = None,
) -> list[Case]:
    """``count`` cases of a generated task at ``length`` units of ``form``, the same for every method.

    Args:
        limit: positions the model has. A case that would not fit with its answer is made that much shorter,
            but for a long ``max_tokens`` (see `check_room`).
        max_tokens: an answer of a byte-level task may take (`json` and `pairs`: at least what they need);
            others bring their own.
        data: folder with RULER's question sets, for `qa_1` and `qa_2`.

    Raises:
        InvalidOption: an unknown task, or a length that has no room for it.
    """
    in_bytes = form.unit == "bytes"
    known = (*BYTE_TASKS, *ruler.TASKS) if in_bytes else TOKEN_TASKS
    if task not in known:
        level = "bytes" if in_bytes else "tokens"
        raise InvalidOption(
            f"task={task!r} is not generated in {level}", f"use one of {', '.join(dict.fromkeys(known))}"
        )
    check_room(task, length, form, limit, max_tokens)
    haystack = Haystack.load()
    passages = qa.load(task, data) if data is not None and task in qa.FILES else None
    made = []
    for number in range(count):
        key = f"{seed} {length} {task} {number}"
        try:
            if in_bytes and task in (*tasks.TASKS, *structured.TASKS):
                made.append(_of_bytes(task, length, key, limit, max_tokens, haystack))
            else:
                made.append(_of_ruler(task, length, key, limit, form, haystack, passages))
        except ValueError as error:
            raise InvalidOption(f"task={task!r}: {error}", "use a longer --lengths") from error
    return made


def check_room(task: str, length: int, form: forms.PromptForm, limit: int, max_tokens: int) -> None:
    """Refuse a byte-level answer that leaves its prompt less than 15/16 of ``length``: it would be another
    length's.

    Raises:
        InvalidOption: names the longest answer.
    """
    if form.unit != "bytes" or task not in BYTE_TASKS:
        return
    longest = limit - length + length // 16
    if answer_bytes(task, max_tokens) > longest:
        raise InvalidOption(
            f"--max-tokens {max_tokens} leaves {max(limit - max_tokens, 0):,} of {limit:,} positions for a "
            f"prompt of --lengths {length}",
            f"use --max-tokens {longest} or less",
        )


def answer_bytes(task: str, max_tokens: int) -> int:
    """Tokens an answer to a byte-level task may take."""
    return max(max_tokens, structured.ANSWER_BYTES) if task in structured.TASKS else max_tokens


def _of_bytes(task: str, length: int, key: str, limit: int, max_tokens: int, haystack: Haystack) -> Case:
    rng = random.Random(key)
    many = task in structured.TASKS
    max_tokens = answer_bytes(task, max_tokens)
    make = structured.make if many else tasks.make
    example = make(task, min(length, limit - max_tokens), rng, haystack)
    metric = task if many else "items"
    return Case(
        task,
        example.prompt,
        tuple(example.meta["items"]),
        metric,
        max_tokens,
        facts=example.meta.get("facts", {}),
        asked=example.meta.get("asked", 0),
    )


def _of_ruler(
    task: str,
    length: int,
    key: str,
    limit: int,
    form: forms.PromptForm,
    haystack: Haystack,
    passages: qa.Passages | None,
) -> Case:
    kind = task.split("_")[0]
    made = ruler.make(task, min(length, limit - ruler.MAX_TOKENS[kind]), key, form, haystack, passages)
    metric = task if task in structured.TASKS else "any_reference" if kind == "qa" else "all_references"
    source = "" if kind != "qa" else passages.source if passages is not None else "bundled"
    return Case(
        task,
        made.prompt.text,
        made.references,
        metric,
        made.max_tokens,
        made.prompt.ids,
        made.facts,
        made.asked,
        source=source,
    )

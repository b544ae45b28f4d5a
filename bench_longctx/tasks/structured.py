"""Tasks whose answer holds many facts: `json` (a set of asked keys, as JSON) and `pairs` (keys of one's own
choice).

They are what methods that keep part of the KV are known to fail at. In `json` one answer needs many places of
the document. In `pairs` the model chooses a key and must then copy its value, so what a block needs is not
known when the block begins.

`Document` form (bytes): the wording of the other tasks of `tiny`. `prompt_parts` form: for any checkpoint.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence

from . import Example, wording
from .document import Document, Fact, Question
from .forms import Parts
from .haystack import Haystack

TASKS = ("json", "pairs")
ASKED = 8
FACTS = (12, 40)
# An answer in bytes is never longer.
ANSWER_BYTES = 288

JSON_QUESTIONS = (
    "Give the {a}s of {ks} as JSON.",
    "What are the {a}s of {ks}? Answer in JSON.",
    "Write the {a}s of {ks} as a JSON object.",
)
PAIRS_QUESTIONS = (
    "Choose {n} names and write each with its {a}.",
    "Write {n} names of your choice, each with its {a}.",
    "Name any {n} that have a {a}, and write the {a} of each.",
)


def make(task: str, length_bytes: int, rng: random.Random, haystack: Haystack) -> Example:
    """One example of `json` or `pairs` in bytes, as `bench_longctx.tasks.make`.

    ``meta`` has ``facts``, all that can be asked for ({key: value}), and ``asked``, how many are.

    Raises:
        ValueError: an unknown task, or a length under 1,024.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; one of {', '.join(TASKS)}")
    if length_bytes < 1024:
        raise ValueError(f"length_bytes={length_bytes} is too short; at least 1024")
    while True:
        document = Document(rng, haystack)
        size = length_bytes - 400
        wanted = rng.randint(*FACTS)
        while document.planned_bytes < 0.6 * size and len(document.singles) < wanted:
            document.add_single()
        facts = common_facts(document)
        if len(facts) < 2:
            continue
        document.render(size)
        asked = min(ASKED, len(facts))
        question = ask_json(document, asked) if task == "json" else ask_pairs(document, asked)
        prompt = document.text + wording.frame(rng).format(q=question.text)
        if len(prompt.encode("utf-8")) > length_bytes:
            continue
        meta = {
            "items": list(question.items),
            "document_bytes": len(document.text.encode("utf-8")),
            "facts": {f.key: f.value for f in facts},
            "asked": asked,
        }
        return Example(prompt, question.answer, task, meta)


def common_facts(document: Document) -> list[Fact]:
    """The facts of the attribute that most keys have."""
    if not document.singles:
        return []
    attribute, _ = Counter(f.attribute for f in document.singles).most_common(1)[0]
    return [f for f in document.singles if f.attribute == attribute]


def ask_json(document: Document, count: int) -> Question:
    """Ask for ``count`` facts of one attribute; the answer is a JSON object in the question's order."""
    facts = document.rng.sample(common_facts(document), count)
    keys = [f.key for f in facts]
    listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    text = document.rng.choice(JSON_QUESTIONS).format(a=facts[0].attribute, ks=listed)
    answer = json.dumps({f.key: f.value for f in facts}, ensure_ascii=False)
    return Question("json", text, answer, tuple(f.value for f in facts))


def ask_pairs(document: Document, count: int) -> Question:
    """Ask for any ``count`` facts of one attribute. The answer is one of many that are right."""
    facts = document.rng.sample(common_facts(document), count)
    text = document.rng.choice(PAIRS_QUESTIONS).format(a=facts[0].attribute, n=count)
    answer = "; ".join(f"{f.key}: {f.value}" for f in facts)
    return Question("pairs", text, answer, tuple(f.value for f in facts))


def score(example: Example, output: str) -> tuple[bool, float]:
    """Whether the answer is right as a whole, and the share of it that is; as `bench_longctx.tasks.score`."""
    facts = example.meta["facts"]
    if example.task == "json":
        share = values_right(output, facts, example.meta["items"])
    else:
        share = pairs_right(output, facts, example.meta["asked"])
    return share == 1, share


def values_right(answer: str, facts: dict[str, str], values: Sequence[str]) -> float:
    """Share of the asked keys whose value is right, of the first JSON object in the answer.

    An object that is cut off counts as far as it goes; a key that was not asked for counts as a wrong one.

    Args:
        facts: {key: value}, all there are.
        values: of the keys that were asked for.
    """
    given = read_object(answer)
    keys = [key for key, value in facts.items() if value in values]
    right = sum(given.get(key) == facts[key] for key in keys)
    extra = sum(key not in keys for key in given)
    return right / max(len(keys) + extra, 1)


def pairs_right(answer: str, facts: dict[str, str], asked: int) -> float:
    """Correct pairs / pairs written or asked for, whichever are more: 1 when every pair is one of the
    document, none comes twice, and they are as many as were asked for."""
    right, written = pair_counts(answer, facts)
    return min(right, asked) / max(written, asked, 1)


def pair_counts(answer: str, facts: dict[str, str]) -> tuple[int, int]:
    """(correct pairs, pairs written): ``key: value``, one a line or between semicolons. A key that was
    written before is no new pair: written, not correct."""
    known = {_bare(key): value for key, value in facts.items()}
    right = written = 0
    seen: set[str] = set()
    for piece in re.split(r"[;\n]", answer):
        key, colon, value = piece.partition(": ")
        if not colon or not value.strip():
            continue
        written += 1
        name = _bare(re.sub(r"^\s*(?:[-*]|\d+[.)])\s+", "", key))
        right += name not in seen and known.get(name) == value.strip().rstrip(".,")
        seen.add(name)
    return right, written


def read_object(text: str) -> dict[str, str]:
    """The pairs of the first JSON object in ``text``, as strings, whole or cut off; empty without one."""
    begin = text.find("{")
    if begin < 0:
        return {}
    try:
        found, _ = json.JSONDecoder().raw_decode(text[begin:])
        return {str(key): str(value) for key, value in found.items()}
    except ValueError:
        return dict(re.findall(r'"([^"\\]*)"\s*:\s*"([^"\\]*)"', text[begin:]))


def _bare(key: str) -> str:
    return key.strip().lower().removeprefix("the ")


def facts_for(count: int, rng: random.Random) -> dict[str, str]:
    """Distinct keys of two words with seven digits each."""
    w = wording.words()
    facts: dict[str, str] = {}
    while len(facts) < count:
        facts.setdefault(f"{rng.choice(w['adjectives'])} {rng.choice(w['nouns'])}", wording.digits(rng, 7, 7))
    return facts


def prompt_parts(
    task: str, context: str, facts: dict[str, str], rng: random.Random
) -> tuple[Parts, tuple[str, ...]]:
    """The same two tasks for a checkpoint that follows instructions, and the values expected (`json` only).

    Args:
        context: a text with a sentence `statement` of every fact.
    """
    instruction = (
        "The text below says, here and there, which access code belongs to which name. Read it with care."
    )
    if task == "json":
        keys = rng.sample(sorted(facts), asked_of(facts))
        question = (
            "Answer with one JSON object and nothing else. Its keys are these names, in this order, and the "
            f"value of each is its access code from the text above, as a string: {', '.join(keys)}."
        )
        return Parts(instruction, context, question), tuple(facts[key] for key in keys)
    question = (
        f"Choose {asked_of(facts)} of the names that have an access code in the text above, in any order. "
        "Write one line for each, first the name, then a colon, then its access code, and nothing else."
    )
    return Parts(instruction, context, question), ()


def asked_of(facts: dict[str, str]) -> int:
    """How many of a checkpoint's facts are asked for, or are to be chosen."""
    return min(2 * ASKED, len(facts))


def statement(key: str, value: str) -> str:
    """The sentence that says a fact."""
    return f"The access code of {key} is {value}."

"""RULER's thirteen tasks (Hsieh et al. 2024, arXiv 2404.06654, section 3 and appendix B), for any checkpoint.

Definitions and sizes are the paper's, the wording is ours. Needles: one fact among filler, of several keys,
values or queries, with words, numbers or UUIDs. Variable tracking: five names that hold one value through
four assignments. Common words: the ten words that occur thirty times in a list where the others occur three
times. Frequent words: the three most frequent of made-up words whose counts follow a zeta distribution with
exponent 2. Question answering: a passage with the answer among others (`qa`).

The filler called "essay" is the held-out text of this repository (a novel, Bible books, a manual, a lexicon);
RULER's is essays by P. Graham, which are not ours to redistribute.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from . import qa, structured, wording
from .forms import Parts, Prompt, PromptForm, largest_fit
from .haystack import Haystack

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
COMMON, COMMON_TIMES, UNCOMMON_TIMES = 10, 30, 3
FREQUENT_ASKED, ZETA_EXPONENT = 3, 2.0
HOPS = 4
# Bytes of a sentence of filler: a longer one would leave a gap at the end.
LONGEST_SENTENCE = 500
# Tokens below which a list of common words has a third of the repetitions.
SHORT_LIST = 4096

# Tokens an answer may take, as published.
MAX_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32, "json": 512, "pairs": 768}


@dataclass(frozen=True)
class Needles:
    """A needle task: what the filler is, and how many keys, values and queries there are."""

    filler: str = "essay"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"


NEEDLES = {
    "niah_single_1": Needles(filler="noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(value_kind="uuids"),
    "niah_multikey_1": Needles(keys=4),
    "niah_multikey_2": Needles(filler="needles"),
    "niah_multikey_3": Needles(filler="needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles(values=4),
    "niah_multiquery": Needles(keys=4, queries=4),
}
RULER_TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")
TASKS = (*RULER_TASKS, *structured.TASKS)

Draft = tuple[Parts, tuple[str, ...]]


@dataclass(frozen=True)
class TaskPrompt:
    """A finished prompt with what is expected.

    Attributes:
        references: strings that the answer must have.
        max_tokens: an answer may take.
        facts: of `json` and `pairs`, {key: value}; empty otherwise.
        asked: of these, how many.
    """

    task: str
    prompt: Prompt
    references: tuple[str, ...]
    max_tokens: int
    facts: dict[str, str] = field(default_factory=dict)
    asked: int = 0


def make(
    task: str,
    length: int,
    seed: str,
    form: PromptForm,
    haystack: Haystack,
    passages: qa.Passages | None = None,
) -> TaskPrompt:
    """One prompt of ``task`` that takes at most ``length`` units of ``form``, and about as many.

    Everything follows from ``seed``.

    Args:
        passages: of the tasks `qa_1` and `qa_2`; None for what the filler gives (see `qa.bundled`).

    Raises:
        ValueError: an unknown task, or a length in which the task has no room.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; one of {', '.join(TASKS)}")
    draft, most = _drafter(task, seed, length, form, haystack, passages)
    made: dict[int, tuple[Prompt, tuple[str, ...]]] = {}

    def measure(count: int) -> int:
        parts, references = draft(count)
        made[count] = form.assemble(parts), references
        return form.length(made[count][0])

    best = largest_fit(measure, length, most)
    prompt, references = made[best]
    kind = task.split("_")[0]
    facts = _facts(task, seed)
    asked = structured.asked_of(facts)
    return TaskPrompt(task, prompt, references, MAX_TOKENS[kind], facts, asked)


def _drafter(
    task: str,
    seed: str,
    length: int,
    form: PromptForm,
    haystack: Haystack,
    passages: qa.Passages | None,
) -> tuple[Callable[[int], Draft], int]:
    """A function from the number of filler units to a draft, and the largest number that makes sense."""
    most = length  # no unit is shorter than a token or a byte
    if task in NEEDLES:
        spec = NEEDLES[task]
        return (lambda count: needles(spec, count, random.Random(seed), haystack)), most
    if task == "vt":
        return (lambda count: variable_tracking(count, random.Random(seed))), most
    if task == "cwe":
        short = length < SHORT_LIST * (4 if form.unit == "bytes" else 1)
        return (lambda count: common_words(count, random.Random(seed), short)), len(_plain_words()) - COMMON
    if task == "fwe":
        return (lambda count: frequent_words(count, length, random.Random(seed))), most
    if task in structured.TASKS:
        facts = _facts(task, seed)
        return (lambda count: _structured(task, facts, count, random.Random(seed), haystack)), most
    known = passages or qa.bundled(haystack)
    return (lambda count: known.ask(count, random.Random(seed))), len(known.texts) - 1


def filler(kind: str, count: int, rng: random.Random, haystack: Haystack) -> list[str]:
    """``count`` sentences of "essay" or "noise", from a place the generator draws."""
    if kind == "noise":
        return [NOISE] * count
    total = len(haystack.starts) - 1
    at = rng.randrange(total)
    picked: list[str] = []
    for i in itertools.cycle(range(total)):
        if len(picked) == count:
            return picked
        begin, end = haystack.starts[(at + i) % total : (at + i) % total + 2]
        if end - begin <= LONGEST_SENTENCE:
            picked.append(haystack.text[begin:end].decode("utf-8").strip())
    return picked


def spread(sentences: list[str], statements: list[str], rng: random.Random, between: str = " ") -> str:
    """Statements put between sentences at places drawn evenly, kept in their order."""
    places = sorted(rng.randint(0, len(sentences)) for _ in statements)
    out, at = [], 0
    for place, statement in zip(places, statements, strict=True):
        out += sentences[at:place]
        out.append(statement)
        at = place
    return between.join(out + sentences[at:])


def _draw(kind: str, rng: random.Random) -> str:
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind == "numbers":
        return wording.digits(rng, 7, 7)
    w = wording.words()
    return f"{rng.choice(w['adjectives'])}-{rng.choice(w['nouns'])}"


def _distinct(kind: str, count: int, rng: random.Random) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn.setdefault(_draw(kind, rng))
    return list(drawn)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def needles(spec: Needles, count: int, rng: random.Random, haystack: Haystack) -> Draft:
    """Retrieval of needles (section 3.1). With the filler "needles", units are needles of other keys."""
    what = "number" if spec.value_kind == "numbers" else "UUID"
    keys = _distinct(spec.key_kind, spec.keys, rng)
    asked = rng.sample(keys, spec.queries)
    values = {key: _distinct(spec.value_kind, spec.values, rng) for key in keys}
    said = [(key, value) for key in keys for value in values[key]]
    rng.shuffle(said)

    def sentence(key: str, value: str) -> str:
        return f"One of the special magic {what}s for {key} is: {value}."

    statements = [sentence(*pair) for pair in said]
    if spec.filler == "needles":
        others = [sentence(_draw(spec.key_kind, rng), _draw(spec.value_kind, rng)) for _ in range(count)]
        context = spread(others, statements, rng, "\n")
    else:
        context = spread(filler(spec.filler, count, rng, haystack), statements, rng)
    references = tuple(value for key in asked for value in values[key])
    plural = "s" if len(references) > 1 else ""
    instruction = (
        f"Some special magic {what}s are hidden in the text below. Read it with care and keep them in mind: "
        f"the question at the end asks for {'them' if plural else 'one of them'}."
    )
    names = _listed(asked)
    verb, all_ = ("are", "all ") if plural else ("is", "")
    question = f"What {verb} {all_}the special magic {what}{plural} for {names} that the text gives?"
    prefix = f"The special magic {what}{plural} for {names} that the text gives {verb}"
    return Parts(instruction, context, question, prefix), references


def variable_tracking(count: int, rng: random.Random) -> Draft:
    """One chain of four hops (section 3.2); an example with a chain of its own comes first, as published."""

    def chain() -> tuple[str, list[str], list[str]]:
        value = wording.digits(rng, 5, 5)
        names: list[str] = []
        while len(names) <= HOPS:
            name = wording.variable(rng)
            if name not in names:
                names.append(name)
        sources = [value, *(f"VAR {name}" for name in names[:-1])]
        return value, names, [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]

    def ask(value: str) -> tuple[str, str]:
        return (
            f"Which variables are assigned the value {value} in the text above, directly or through others?",
            f"There are {HOPS + 1} variables that hold {value}:",
        )

    shown, shown_names, shown_lines = chain()
    value, names, lines = chain()
    instruction = (
        "Follow the chains of variable assignments that are hidden in a text. First an example.\n"
        f"{spread([NOISE] * 5, shown_lines, rng)}\n{ask(shown)[0]}\n{ask(shown)[1]} {' '.join(shown_names)}\n"
        "Now the text itself."
    )
    question, prefix = ask(value)
    return Parts(instruction, spread([NOISE] * count, lines, rng), question, prefix), tuple(names)


def _plain_words() -> list[str]:
    w = wording.words()
    return sorted({word for word in (*w["nouns"], *w["adjectives"]) if word.isalpha() and word.islower()})


def common_words(count: int, rng: random.Random, short: bool = False) -> Draft:
    """Ten words thirty times each among ``count`` others three times each (section 3.3), numbered.

    Args:
        short: ten times and once, for lengths that have no room for more.
    """
    times, rest_times = (COMMON_TIMES // 3, 1) if short else (COMMON_TIMES, UNCOMMON_TIMES)

    def numbered(words: list[str], times: int, rest: list[str], rest_times: int) -> str:
        listed = words * times + rest * rest_times
        rng.shuffle(listed)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))

    drawn = rng.sample(_plain_words(), COMMON + count)
    common, others = drawn[:COMMON], drawn[COMMON:]
    shown = rng.sample(_plain_words(), 2 * COMMON)
    question = f"Which {COMMON} words occur most often in the list above?"
    prefix = f"The {COMMON} words that occur most often are:"
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(shown[:COMMON], 1))
    example = numbered(shown[:COMMON], times // 3, shown[COMMON:], 1)
    instruction = (
        "Below is a numbered list of words, some of which occur more often than others. Keep those that "
        f"occur most often in mind. First an example.\n{example}\n{question}\n{prefix} {answer}\n"
        "Now the list itself."
    )
    return Parts(instruction, numbered(common, times, others, rest_times), question, prefix), tuple(common)


def frequent_words(count: int, length: int, rng: random.Random) -> Draft:
    """The three most frequent of made-up words, counts by a zeta distribution (section 3.3), exponent 2.

    ``count`` words in all; the vocabulary has one word for fifty units of length. The most frequent is a
    run of dots that is not asked for, as published.
    """
    size = max(length // 50, FREQUENT_ASKED + 2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words: dict[str, None] = {}
    while len(words) < size:
        words.setdefault("".join(rng.choice(letters) for _ in range(6)))
    coded = ["...", *words]
    total = sum(rank**-ZETA_EXPONENT for rank in range(1, len(coded) + 1))
    text: list[str] = []
    for rank, word in enumerate(coded, 1):
        text += [word] * (round(count * rank**-ZETA_EXPONENT / total) if count else 0)
    rng.shuffle(text)
    instruction = (
        "Read the coded text below and note how often each coded word occurs in it. Pay no heed to dots."
    )
    question = f"Which are the {FREQUENT_ASKED} coded words that occur most often in the text above?"
    prefix = f"The {FREQUENT_ASKED} coded words that occur most often, dots aside, are:"
    return Parts(instruction, " ".join(text), question, prefix), tuple(coded[1 : FREQUENT_ASKED + 1])


def _facts(task: str, seed: str) -> dict[str, str]:
    if task not in structured.TASKS:
        return {}
    rng = random.Random(f"facts {seed}")
    return structured.facts_for(rng.randint(*structured.FACTS), rng)


def _structured(
    task: str, facts: dict[str, str], count: int, rng: random.Random, haystack: Haystack
) -> Draft:
    statements = [structured.statement(*fact) for fact in facts.items()]
    context = spread(filler("essay", count, rng, haystack), statements, rng)
    return structured.prompt_parts(task, context, facts, rng)

"""A document under construction: facts are planned, then spread over filler text, then asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import wording
from .haystack import Haystack

SENTENCE_BYTES = (30, 150)


@dataclass(frozen=True)
class Question:
    """What follows a document: the question's wording, its answer, and what the answer is made of."""

    task: str
    text: str
    answer: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """`value` is the `attribute` of `key`."""

    key: str
    attribute: str
    value: str


@dataclass
class Document:
    """Facts of all kinds for one document. Plan with `add_*`, call `render` once, then `ask_*`."""

    rng: random.Random
    haystack: Haystack
    singles: list[Fact] = field(default_factory=list)
    groups: list[list[Fact]] = field(default_factory=list)
    chains: list[tuple[str, list[str]]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self._statements: list[tuple[float, str]] = []
        self._taken: set[tuple[str, str]] = set()
        self._values: set[str] = set()
        self._sentences: list[str] = []
        # Few attributes and shared keys make distractors: the same attribute of another key and vice versa.
        self._attributes = self.rng.sample(wording.ATTRIBUTES, self.rng.choice((1, 1, 2, 3, 6, 20)))
        self._keys: list[str] = []
        self._one_phrasing = self.rng.choice(wording.FACTS) if self.rng.random() < 0.3 else None

    def _new_pair(self) -> tuple[str, str]:
        while True:
            shared = self._keys and self.rng.random() < 0.15
            key = self.rng.choice(self._keys) if shared else wording.key(self.rng)
            attribute = self.rng.choice(self._attributes if self.rng.random() < 0.9 else wording.ATTRIBUTES)
            bare = key.lower().removeprefix("the ")
            if (bare, attribute) not in self._taken:
                self._taken.add((bare, attribute))
                self._keys.append(key)
                return key, attribute

    def _new_value(self, draw=wording.value) -> str:
        while (value := draw(self.rng)) in self._values:
            pass
        self._values.add(value)
        return value

    @property
    def planned_bytes(self) -> int:
        """Size of all statements planned so far, each with one separator."""
        return sum(len(s) + 1 for _, s in self._statements)

    def add_single(self) -> Fact:
        """Plan a fact whose key has this attribute once."""
        fact = Fact(*self._new_pair(), self._new_value())
        self.singles.append(fact)
        phrasing = self._one_phrasing or self.rng.choice(wording.FACTS)
        self._statements.append(
            (self.rng.random(), wording.fill(phrasing, fact.attribute, fact.key, fact.value))
        )
        return fact

    def add_group(self, count: int) -> list[Fact]:
        """Plan `count` values of one attribute of one key; their order is the document's."""
        key, attribute = self._new_pair()
        facts = [Fact(key, attribute, self._new_value()) for _ in range(count)]
        phrasing = self.rng.choice(wording.VALUE_FACTS) if self.rng.random() < 0.5 else None
        for place, fact in zip(sorted(self.rng.random() for _ in facts), facts, strict=True):
            text = wording.fill(phrasing or self.rng.choice(wording.VALUE_FACTS), attribute, key, fact.value)
            self._statements.append((place, text))
        self.groups.append(facts)
        return facts

    def add_chain(self, count: int) -> tuple[str, list[str]]:
        """Plan `count` variables: the first gets a number, each next one is assigned its predecessor."""
        value = self._new_value(lambda rng: wording.digits(rng, 5, 5))
        names = [self._new_value(wording.variable) for _ in range(count)]
        phrasing = self.rng.choice(wording.CHAIN_FACTS)
        right = [value] + ["VAR " + name for name in names[:-1]]
        places = sorted(self.rng.random() for _ in names)
        for place, name, source in zip(places, names, right, strict=True):
            self._statements.append((place, phrasing.format(x=name, v=source)))
        self.chains.append((value, names))
        return self.chains[-1]

    def render(self, size: int) -> str:
        """Spread the statements over filler so that the text has about `size` bytes (never more, unless the
        statements alone need more). Returns the text, also kept in `text`."""
        rng = self.rng
        preface = rng.choice(wording.PREFACES) if size > 400 and rng.random() < 0.15 else ""
        filler = [
            s.decode("utf-8") for s in self.haystack.sentences(size - self.planned_bytes - len(preface), rng)
        ]
        self._sentences = [s.strip() for s in filler]
        lines = rng.random() < 0.3
        pieces = [
            (rng.random(), i, text + ("\n" if lines or not text.endswith(".") else " "))
            for i, (_, text) in enumerate(sorted(self._statements))
        ]
        places = sorted(p for p, _, _ in pieces)
        out, at = [preface], 0
        for place, (_, _, text) in zip(places, pieces, strict=True):
            stop = round(place * len(filler))
            out.extend(filler[at:stop])
            if text.endswith("\n") and out[-1][-1:] not in ("\n", ""):
                out[-1] = out[-1].rstrip() + "\n"
            out.append(text)
            at = stop
        out.extend(filler[at:])
        self.text = "".join(out).rstrip()
        return self.text

    def ask_single(self, task: str, fact: Fact | None = None) -> Question:
        """Ask for the value of one fact."""
        fact = fact or self.rng.choice(self.singles)
        text = wording.fill(self.rng.choice(wording.QUESTIONS), fact.attribute, fact.key)
        return Question(task, text, fact.value, (fact.value,))

    def ask_group(self, facts: list[Fact] | None = None) -> Question:
        """Ask for all values of one key, in document order."""
        facts = facts or self.rng.choice(self.groups)
        text = wording.fill(self.rng.choice(wording.VALUES_QUESTIONS), facts[0].attribute, facts[0].key)
        values = tuple(f.value for f in facts)
        return Question("values", text, ", ".join(values), values)

    def ask_several(self, count: int) -> Question:
        """Ask for `count` different facts in one question; the answer lists them in the question's order."""
        facts = self.rng.sample(self.singles, count)
        attributes = {f.attribute for f in facts}
        if len(attributes) == 1 and self.rng.random() < 0.8:
            text = self.rng.choice(wording.SAME_ATTRIBUTE_QUESTIONS).format(
                a=facts[0].attribute, ks=_listing([f.key for f in facts])
            )
        else:
            parts = _listing([f"the {f.attribute} of {f.key}" for f in facts])
            head = self.rng.choice(wording.PAIR_HEADS)
            text = head + parts + ("?" if head.startswith("What") else ".")
        values = tuple(f.value for f in facts)
        return Question("queries", text, ", ".join(values), values)

    def ask_chain(self, chain: tuple[str, list[str]] | None = None) -> Question:
        """Ask for the variables that hold a value (RULER's variable tracking), in document order."""
        value, names = chain or self.rng.choice(self.chains)
        text = self.rng.choice(wording.CHAIN_QUESTIONS).format(v=value)
        return Question("chain", text, ", ".join(names), tuple(names))

    def ask_sentence(self) -> Question | None:
        """Ask to quote a sentence of the filler; None if no sentence can be told from the others."""
        low, high = SENTENCE_BYTES
        fit = [s for s in self._sentences if low <= len(s) <= high and "\n" not in s and s[-1:] in ".!?\"'"]
        for sentence in self.rng.sample(fit, min(len(fit), 8)):
            words = sentence.split(" ")
            begins = self.rng.random() < 0.6
            if begins:
                clue = " ".join(words[: self.rng.randint(3, 4)])
            else:
                clue = self.rng.choice(words).strip(".,;:!?\"'()")
            if '"' in clue or len(clue) < (8 if begins else 6) or self.text.count(clue) != 1:
                continue
            templates = wording.BEGINS_QUESTIONS if begins else wording.MENTIONS_QUESTIONS
            return Question("sentence", self.rng.choice(templates).format(w=clue), sentence, (sentence,))
        return None


def _listing(parts: list[str]) -> str:
    """a and b; a, b and c."""
    return ", ".join(parts[:-1]) + " and " + parts[-1]

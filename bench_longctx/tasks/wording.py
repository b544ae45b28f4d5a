"""Words, attributes and phrasings of the retrieval tasks, and draws from them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

ATTRIBUTES = (
    "secret code",
    "access code",
    "door code",
    "pass code",
    "security code",
    "entry code",
    "code",
    "password",
    "pass phrase",
    "access key",
    "secret key",
    "key number",
    "phone number",
    "telephone number",
    "serial number",
    "account number",
    "ticket number",
    "order number",
    "invoice number",
    "reference number",
    "tracking number",
    "room number",
    "licence number",
    "magic number",
    "special magic number",
    "lucky number",
    "case number",
    "batch number",
    "PIN",
    "price",
    "cost",
    "value",
    "budget",
    "weight",
    "height",
    "length",
    "score",
    "rating",
    "population",
    "temperature",
    "balance",
    "deadline",
    "departure time",
    "arrival time",
    "colour",
    "nickname",
    "code name",
    "call sign",
    "identifier",
    "signature",
    "fingerprint",
    "token",
    "label",
    "category",
    "motto",
    "location",
    "destination",
    "owner",
    "manager",
    "favourite food",
    "favourite animal",
    "magic word",
    "status",
)
FACTS = (
    "The {a} of {k} is {v}.",
    "The {a} of {k} is {v}.",
    "The {a} of {k} is {v}.",
    "The {a} for {k} is {v}.",
    "The {a} for {k} is {v}.",
    "{K}'s {a} is {v}.",
    "The {a} of {k} was {v}.",
    "For {k}, the {a} is {v}.",
    "The {a} of {k}: {v}.",
    "{K}: {a} {v}.",
    "{K} has the {a} {v}.",
    "{K} has {v} as its {a}.",
    "Note that the {a} of {k} is {v}.",
    "Remember: the {a} of {k} is {v}.",
    "Remember that {k} has the {a} {v}.",
    "As of today, the {a} of {k} is {v}.",
    "The {a} assigned to {k} is {v}.",
    "The {a} of {k} has been set to {v}.",
    "The {a} of {k} equals {v}.",
    "In the register, the {a} of {k} is given as {v}.",
    "{a} of {k} = {v}",
    "{a} ({k}): {v}",
    "- {K}, {a}: {v}",
    "Please note: the {a} for {k} is {v}.",
    "It is known that the {a} of {k} is {v}.",
    "We were told that the {a} of {k} is {v}.",
    "The {a} belonging to {k} is {v}.",
    "The {a} of {k} is now {v}.",
    'The {a} of {k} is "{v}".',
    "According to the log, the {a} of {k} is {v}.",
    "The {a} used by {k} is {v}.",
    "Somebody wrote that the {a} of {k} is {v}.",
    "The {a} which belongs to {k} is {v}.",
)
VALUE_FACTS = (
    "One of the {a}s for {k} is: {v}.",
    "One of the {a}s of {k} is {v}.",
    "One of the special {a}s for {k} is: {v}.",
    "One {a} of {k} is {v}.",
    "A {a} of {k} is {v}.",
    "{K} has the {a} {v}.",
    "The {a} of {k} is {v}.",
    "The {a} for {k} is {v}.",
    "Another {a} of {k} is {v}.",
    "One of {k}'s {a}s is {v}.",
    "{K} also uses the {a} {v}.",
)
QUESTIONS = (
    "What is the {a} of {k}?",
    "What is the {a} of {k}?",
    "What is the {a} of {k}?",
    "What is the {a} for {k}?",
    "What is {k}'s {a}?",
    "Which {a} does {k} have?",
    "Tell me the {a} of {k}.",
    "Give the {a} of {k}.",
    "State the {a} of {k}.",
    "What {a} belongs to {k}?",
    "Find the {a} of {k}.",
    "What was the {a} of {k}?",
    "According to the text, what is the {a} of {k}?",
    "What is the {a} of {k} in the text above?",
    "Do you know the {a} of {k}?",
    "I need the {a} of {k}.",
    "For {k}, what is the {a}?",
    "Please give me the {a} for {k}.",
    "What is the {a} for {k} mentioned in the provided text?",
    "Can you find the {a} of {k}?",
    "The {a} of {k}?",
    "Look up the {a} of {k}.",
    "Report the {a} of {k}.",
    "Which {a} is assigned to {k}?",
)
VALUES_QUESTIONS = (
    "What are all the {a}s of {k}?",
    "What are all the {a}s for {k}?",
    "List all {a}s of {k}.",
    "List every {a} of {k}.",
    "Which {a}s does {k} have?",
    "Give all the {a}s of {k}.",
    "Find all {a}s for {k}.",
    "Name all {a}s of {k}.",
    "What are all the {a}s for {k} mentioned in the provided text?",
    "What are all values of the {a} of {k}?",
)
SAME_ATTRIBUTE_QUESTIONS = (
    "What are the {a}s of {ks}?",
    "What are the {a}s for {ks}?",
    "Give the {a}s of {ks}.",
    "Tell me the {a}s of {ks}.",
    "List the {a}s of {ks}.",
    "State the {a}s of {ks}, in this order.",
    "Find the {a}s of {ks}.",
    "What are the {a}s for {ks} mentioned in the provided text?",
)
PAIR_HEADS = ("What are ", "Give ", "Tell me ", "State ", "List ", "Find ", "What is ")
CHAIN_FACTS = ("VAR {x} = {v}", "VAR {x} = {v}", "VAR {x} = {v}.", "VAR {x} = {v};")
CHAIN_QUESTIONS = (
    "Find all variables that are assigned the value {v} in the text above.",
    "Find all variables that are assigned the value {v}.",
    "Which variables hold the value {v}?",
    "List all variables with the value {v}.",
    "Which variables are assigned the value {v}?",
    "Name every variable that has the value {v}.",
)
BEGINS_QUESTIONS = (
    'Quote the sentence that begins with "{w}".',
    'Quote the sentence that starts with "{w}".',
    'Which sentence begins with "{w}"?',
    'Copy the sentence that begins with "{w}".',
    'Repeat the sentence beginning with "{w}".',
    'Complete the sentence that begins with "{w}".',
)
MENTIONS_QUESTIONS = (
    'Quote the sentence that mentions "{w}".',
    'Which sentence mentions "{w}"?',
    'Copy the sentence that contains "{w}".',
    'Quote the sentence with the word "{w}".',
    'Find the sentence that mentions "{w}".',
    'Repeat the sentence in which "{w}" occurs.',
)
PREFACES = (
    "Read the following text and answer the question at the end.\n\n",
    "Some facts are hidden in the text below. Remember them; a question follows.\n\n",
    "Here is a document.\n\n",
    "Document:\n",
    "Text:\n",
    "Context: ",
)
FRAMES = (
    ("\n\nQuestion: {q}\nAnswer:", 12),
    ("\nQuestion: {q}\nAnswer:", 4),
    ("\n{q}\nAnswer:", 3),
    ("\n\n{q}\nAnswer:", 3),
    ("\n\n{q} Answer:", 1),
    ("\n\nQ: {q}\nA:", 2),
)


@cache
def words() -> dict[str, list[str]]:
    """Word lists of words.txt by section: nouns, adjectives, first_names, last_names."""
    lists: dict[str, list[str]] = {}
    section: list[str] = []
    for line in (Path(__file__).parent / "words.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            section = lists.setdefault(line.strip("[]"), [])
        else:
            section.extend(line.split())
    return lists


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that no list holds."""
    parts = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    return parts + rng.choice(("", "n", "r", "s", "x", "th", "l"))


def key(rng: random.Random) -> str:
    """The name of a thing, person or place that has attributes."""
    w, kind = words(), rng.random()
    if kind < 0.22:
        return rng.choice(w["nouns"])
    if kind < 0.34:
        return "the " + rng.choice(w["nouns"])
    if kind < 0.54:
        return (
            ("the " if rng.random() < 0.5 else "")
            + rng.choice(w["adjectives"])
            + " "
            + rng.choice(w["nouns"])
        )
    if kind < 0.62:
        return rng.choice(w["nouns"]) + " " + rng.choice(w["nouns"])
    if kind < 0.70:
        return rng.choice(w["adjectives"]).title() + " " + rng.choice(w["nouns"]).title()
    if kind < 0.82:
        return rng.choice(w["first_names"]) + (
            "" if rng.random() < 0.4 else " " + rng.choice(w["last_names"])
        )
    if kind < 0.90:
        return invented_word(rng).title()
    return rng.choice(("room ", "Room ", "unit ", "station ", "Project ", "box ", "gate ", "Line ")) + (
        str(rng.randint(2, 999)) if rng.random() < 0.6 else invented_word(rng).title()
    )


def digits(rng: random.Random, low: int, high: int) -> str:
    """A number of `low` to `high` digits that does not begin with 0."""
    size = rng.randint(low, high)
    return str(rng.randrange(10 ** (size - 1), 10**size))


def value(rng: random.Random) -> str:
    """A value: mostly 4 to 8 digits; also a word or two, hexadecimal and mixed codes, decimals, times."""
    w, kind = words(), rng.random()
    if kind < 0.52:
        return digits(rng, 4, 8)
    if kind < 0.64:
        return rng.choice(w["nouns"])
    if kind < 0.74:
        return rng.choice(w["adjectives"]) + " " + rng.choice(w["nouns"])
    if kind < 0.84:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(6, 8)))
    if kind < 0.92:
        return (
            "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(2, 3)))
            + "-"
            + digits(rng, 3, 5)
        )
    if kind < 0.96:
        return f"{rng.randint(2, 999)}.{rng.randint(10, 99)}"
    return f"{rng.randint(10, 23)}:{rng.randint(10, 59)}"


def variable(rng: random.Random) -> str:
    """A variable name of five capital letters, as RULER's."""
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))


def frame(rng: random.Random) -> str:
    """A format string that puts a question `{q}` after a document."""
    return rng.choices([f for f, _ in FRAMES], [n for _, n in FRAMES])[0]


def fill(template: str, a: str = "", k: str = "", v: str = "") -> str:
    """Fill a phrasing; `{K}` is the key with a capital first letter, and so is the start of the line."""
    text = template.format(a=a, k=k, K=k[:1].upper() + k[1:], v=v)
    return text[:1].upper() + text[1:]

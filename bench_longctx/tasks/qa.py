"""Passages with questions, for RULER's `qa_1` and `qa_2`: of the user's files, or made of the held-out text.

The paper puts the passage that answers a question (SQuAD, HotpotQA) among passages of other questions. Those
data sets are read from the user's folder where they are. What is bundled instead: paragraphs of the held-out
text (`haystack_heldout.txt.xz`), each with cloze questions: a sentence of it with one word, which occurs in
no other paragraph, left out. That measures finding a passage, not the data sets' questions, and results say
"bundled".
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from herald.errors import UsageError

from .forms import Parts
from .haystack import Haystack

FILES = {
    "qa_1": ("squad.json", "dev-v2.0.json"),
    "qa_2": ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
}
_WORD = re.compile(r"[A-Za-z][a-z]{5,}")


@dataclass(frozen=True)
class Asked:
    """A question, the answers that are right (any of them), and the passages that say so."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[int, ...]


@dataclass(frozen=True)
class Passages:
    """Passages and questions about them.

    Attributes:
        source: where they are from, for the report.
    """

    source: str
    texts: tuple[str, ...]
    asked: tuple[Asked, ...]

    def ask(self, count: int, rng: random.Random) -> tuple[Parts, tuple[str, ...]]:
        """A question's passages among ``count`` others, in random order; (parts, answers)."""
        asked = rng.choice(self.asked)
        order = [
            i for i in rng.sample(range(len(self.texts)), min(len(self.texts), count + len(asked.passages)))
        ]
        others = [i for i in order if i not in asked.passages][:count]
        shown = [*asked.passages, *others]
        rng.shuffle(shown)
        context = "\n\n".join(f"Document {n}:\n{self.texts[i]}" for n, i in enumerate(shown, 1))
        instruction = (
            "Answer the question from the documents below. Give the answer alone, in a few words, and "
            "nothing else."
        )
        question = f"Answer from the documents above, with the answer alone.\nQuestion: {asked.question}"
        return Parts(instruction, context, question, "Answer:"), asked.answers


def bundled(haystack: Haystack) -> Passages:
    """Cloze questions on the paragraphs of the held-out text.

    Raises:
        ValueError: the text has no two paragraphs with a word of their own.
    """
    return _cloze(haystack.text)


@cache
def _cloze(corpus: bytes) -> Passages:
    paragraphs = [p.strip() for p in corpus.decode("utf-8").split("\n")]
    texts = tuple(p for p in paragraphs if 200 <= len(p) <= 1200)
    counts = Counter(word for text in texts for word in _WORD.findall(text))
    asked = []
    for number, text in enumerate(texts):
        for sentence in re.split(r"(?<=[.!?]) ", text):
            alone = [w for w in _WORD.findall(sentence) if counts[w] == 1 and sentence.count(w) == 1]
            if alone and 60 <= len(sentence) <= 240:
                question = f'Which word is left out here: "{sentence.replace(alone[0], "_____")}"?'
                asked.append(Asked(question, (alone[0],), (number,)))
                break
    if len(asked) < 2:
        raise ValueError(f"a text of {len(corpus)} bytes gives {len(asked)} questions; at least 2 are needed")
    return Passages("bundled", texts, tuple(asked))


def load(task: str, folder: Path) -> Passages | None:
    """The data set of ``task`` from the user's folder; None where there is no such file.

    Reads SQuAD 2.0 (``squad.json`` or ``dev-v2.0.json``) and HotpotQA (``hotpotqa.json`` or
    ``hotpot_dev_distractor_v1.json``) as published.

    Raises:
        UsageError: the file is there and is something else.
    """
    for name in FILES[task]:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text("utf-8"))
            passages = _squad(content, name) if task == "qa_1" else _hotpot(content, name)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(f"{path} is not the published file ({error!r})", "download it again") from error
        if not passages.asked:
            raise UsageError(f"{path} has no question with an answer", "download it again")
        return passages
    return None


def _squad(content: dict, name: str) -> Passages:
    texts: list[str] = []
    asked: list[Asked] = []
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            texts.append(paragraph["context"])
            for entry in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                if answers and not entry.get("is_impossible", False):
                    asked.append(Asked(entry["question"], answers, (len(texts) - 1,)))
    return Passages(name, tuple(texts), tuple(asked))


def _hotpot(content: list, name: str) -> Passages:
    numbers: dict[str, int] = {}
    asked: list[Asked] = []
    for entry in content:
        own = {f"{title}\n{''.join(sentences)}": title for title, sentences in entry["context"]}
        for text in own:
            numbers.setdefault(text, len(numbers))
        needed = {title for title, _ in entry["supporting_facts"]} if "supporting_facts" in entry else None
        held = tuple(numbers[text] for text, title in own.items() if needed is None or title in needed)
        asked.append(Asked(entry["question"], (entry["answer"],), held))
    return Passages(name, tuple(numbers), tuple(asked))

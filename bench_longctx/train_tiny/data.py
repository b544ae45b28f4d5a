"""Training rows: random documents, all kinds of facts, many questions each; packed by a length curriculum."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..tasks import TASKS, structured, wording
from ..tasks.document import Document, Question
from ..tasks.haystack import Haystack
from .packing import BLOCK, Packed
from .tokenizer import EOS, MASK, PAD

ASKED = (*TASKS, *structured.TASKS)
KINDS = (*ASKED, "end")
END_KIND = len(ASKED)

# (share of the schedule where the stage ends, [(shortest, longest document in bytes, share of the tokens)])
STAGES = (
    (0.06, ((96, 256, 1.0),)),
    (0.38, ((128, 512, 1.0),)),
    (0.56, ((192, 1024, 0.6), (1024, 2048, 0.4))),
    (0.80, ((192, 1024, 0.3), (1024, 4096, 0.3), (6000, 8192, 0.4))),
    (1.0, ((256, 2048, 0.3), (4096, 8192, 0.3), (12000, 16384, 0.25), (26000, 32200, 0.15))),
)
ASK_WEIGHTS = {
    "single": 4.0,
    "values": 2.6,
    "queries": 2.0,
    "chain": 2.6,
    "sentence": 0.8,
    **dict.fromkeys(structured.TASKS, 0.8),
}
SENTENCE_WEIGHT = 0.4
END_WEIGHT = 0.15


def stage_at(progress: float) -> int:
    """Index of the stage in force at `progress` (0 to 1) of the schedule."""
    return next((i for i, (end, _) in enumerate(STAGES) if progress < end), len(STAGES) - 1)


def training_document(size: int, rng: random.Random, haystack: Haystack) -> Document:
    """A document of about `size` bytes with a random density of facts, groups and chains."""
    document = Document(rng, haystack)
    budget = min(size * rng.uniform(0.1, 0.9), 6000)
    weights = rng.choice(((8, 2, 2), (3, 2, 0), (3, 0, 2), (2, 2, 2), (1, 0, 0), (1, 3, 1), (1, 1, 3)))
    while not document._statements or document.planned_bytes < budget:
        kind = rng.choices(("single", "group", "chain"), weights)[0]
        if kind == "single":
            document.add_single()
        elif kind == "group":
            document.add_group(rng.randint(2, 4 if size > 256 else 3))
        else:
            document.add_chain(rng.randint(2, 5 if size > 256 else 3))
    document.render(size)
    return document


def ask_weights(factor: float) -> dict[str, float]:
    """`ASK_WEIGHTS` with those of `json` and `pairs` times `factor`."""
    return {
        name: weight * (factor if name in structured.TASKS else 1) for name, weight in ASK_WEIGHTS.items()
    }


def questions(document: Document, count: int, weights: dict[str, float] | None = None) -> list[Question]:
    """Up to `count` questions; no group or chain is asked for twice, a single fact only after all others.

    weights: how often each kind is asked relative to the others, `ASK_WEIGHTS` unless given.
    """
    weights = weights or ASK_WEIGHTS
    rng = document.rng
    groups = rng.sample(document.groups, len(document.groups))
    chains = rng.sample(document.chains, len(document.chains))
    singles: list = []
    common = len(structured.common_facts(document))
    out: list[Question] = []
    for _ in range(count):
        able = [
            ("sentence", True),
            ("single", document.singles),
            ("queries", len(document.singles) > 1),
            ("values", groups),
            ("chain", chains),
            ("json", common > 1),
            ("pairs", common > 1),
        ]
        names = [name for name, possible in able if possible]
        name = rng.choices(names, [weights[n] for n in names])[0]
        if name == "single":
            singles = singles or rng.sample(document.singles, len(document.singles))
            out.append(document.ask_single("needle" if len(document.singles) <= 4 else "keys", singles.pop()))
        elif name == "queries":
            out.append(document.ask_several(rng.randint(2, min(4, len(document.singles)))))
        elif name == "values":
            out.append(document.ask_group(groups.pop()))
        elif name == "chain":
            out.append(document.ask_chain(chains.pop()))
        elif name == "json":
            out.append(structured.ask_json(document, rng.randint(2, min(structured.ASKED, common))))
        elif name == "pairs":
            out.append(structured.ask_pairs(document, rng.randint(2, min(structured.ASKED, common))))
        elif (question := document.ask_sentence()) is not None:
            out.append(question)
    return out


class RowPacker:
    """Fills one packed row with documents and branches."""

    def __init__(self, size: int, rng: random.Random):
        self.row = Packed.empty(size, size // 4, PAD)
        self.rng = rng
        self.blocks = 0
        self.losses = 0
        self.documents = 0
        self.branches = 0

    @property
    def room(self) -> int:
        """Tokens left."""
        return len(self.row.tokens) - self.blocks * BLOCK

    def _put(self, tokens: list[int] | bytes, number: int, *, document: int, branch: int, clean: bool) -> int:
        """Append whole blocks; returns the index of the first token."""
        row, at, count = self.row, self.blocks * BLOCK, len(tokens) // BLOCK
        row.tokens[at : at + len(tokens)] = list(tokens)
        blocks = slice(self.blocks, self.blocks + count)
        row.number[blocks] = range(number, number + count)
        row.query_document[blocks] = document
        row.query_branch[blocks] = branch if branch >= 0 else -2
        if clean and branch >= 0:
            row.key_branch[blocks] = branch
        elif clean:
            row.key_document[blocks] = document
        self.blocks += count
        return at

    def add(self, document: Document, asked: list[Question]) -> None:
        """Append a document and as many of its branches as there is room for."""
        text = document.text.encode("utf-8")
        whole = len(text) // BLOCK * BLOCK
        if not asked or whole + 512 > self.room:
            return
        self._put(text[:whole], 0, document=self.documents, branch=-1, clean=True)
        for index, question in enumerate(asked):
            earlier = asked[index - 1] if index and self.rng.random() < 0.1 else None
            self._add_branch(text[whole:], whole // BLOCK, question, earlier)
        self.documents += 1

    def _add_branch(self, tail: bytes, number: int, question: Question, earlier: Question | None) -> None:
        rng = self.rng
        frame = wording.frame(rng)
        turn = frame.format(q=earlier.text) + f" {earlier.answer}\n" if earlier else ""
        prompt = tail + (turn + frame.format(q=question.text)).encode("utf-8")
        answer = f" {question.answer}\n".encode()
        size = (len(prompt) + len(answer)) // BLOCK * BLOCK + BLOCK
        tokens = list(prompt + answer) + [EOS] * (size - len(prompt) - len(answer))
        first, last = len(prompt) // BLOCK, size // BLOCK
        again = 0.2 if question.task == "sentence" else 0.6
        copies = [
            (b, rate)
            for b in range(first, last)
            for rate in ((1.0, rng.uniform(0.05, 1)) if rng.random() < again else (1.0,))
        ]
        spare = len(self.row.slots) - self.losses - len(copies) * BLOCK
        if (last - 1 + len(copies)) * BLOCK > self.room or spare < 0:
            return
        ids = {"document": self.documents, "branch": self.branches}
        self._put(tokens[: (last - 1) * BLOCK], number, clean=True, **ids)
        for block, rate in copies:
            at = self._put(tokens[block * BLOCK : (block + 1) * BLOCK], number + block, clean=False, **ids)
            self._mask(at, block * BLOCK, tokens, len(prompt), len(prompt) + len(answer), rate, question.task)
        self.branches += 1

    def _mask(
        self, at: int, start: int, tokens: list[int], begin: int, end: int, rate: float, task: str
    ) -> None:
        """Mask the answer's tokens of one noisy block with probability `rate` and note their losses."""
        weight = SENTENCE_WEIGHT if task == "sentence" else 1.0
        row = self.row
        for i in range(max(start, begin), start + BLOCK):
            if rate < 1 and self.rng.random() >= rate:
                continue
            n = self.losses
            row.tokens[at + i - start] = MASK
            row.slots[n], row.targets[n] = at + i - start, tokens[i]
            row.weights[n] = weight if i < end + 1 else END_WEIGHT
            row.kinds[n] = ASKED.index(task) if i < end else END_KIND
            self.losses += 1


class Rows(IterableDataset):
    """An endless stream of packed rows; the curriculum follows `progress`, shared between processes."""

    def __init__(
        self,
        haystack: Haystack,
        size: int,
        progress: Synchronized,
        seed: int,
        longest: int,
        structured_weight: float = 1.0,
    ):
        self.haystack, self.size, self.progress, self.seed, self.longest = (
            haystack,
            size,
            progress,
            seed,
            longest,
        )
        self.weights = ask_weights(structured_weight)

    def __iter__(self) -> Iterator[Packed]:
        info = get_worker_info()
        torch.set_num_threads(1)
        rng = random.Random(self.seed * 1000 + (info.id if info else 0))
        spent: dict[int, float] = {}
        while True:
            yield self._row(rng, spent, STAGES[stage_at(self.progress.value)][1])

    def _row(self, rng: random.Random, spent: dict[int, float], lengths: tuple) -> Packed:
        packer = RowPacker(self.size, rng)
        for _ in range(10_000):
            fitting = [
                (lo, min(hi, self.longest), share)
                for lo, hi, share in lengths
                if lo <= self.longest and lo * 1.3 + 1024 < packer.room
            ]
            if not fitting:
                break
            # The length class that is furthest behind its share of the tokens comes next.
            lo, hi, _ = min(fitting, key=lambda x: spent.get(x[0], 0.0) / x[2] + rng.random())
            hi = max(lo, min(hi, int((packer.room - 900) / 1.2)))
            size = int(math.exp(rng.uniform(math.log(lo), math.log(hi))))
            document = training_document(size, rng, self.haystack)
            before = packer.room
            count = round(min(32, max(4, 1.1 * size**0.34)))
            packer.add(document, questions(document, count, self.weights))
            spent[lo] = spent.get(lo, 0.0) + before - packer.room
        return packer.row


def loader(rows: Rows, workers: int) -> DataLoader:
    """Rows from worker processes, as numpy arrays (pickled through pipes: they are small)."""
    return DataLoader(
        rows,
        batch_size=None,
        num_workers=workers,
        collate_fn=lambda row: row,
        prefetch_factor=3 if workers else None,
    )

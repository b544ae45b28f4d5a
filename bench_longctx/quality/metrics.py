"""Metrics as published, each from 0 to 1, of an answer against a case.

RULER's are those of its paper (arXiv 2404.06654, section 4) and evaluation script; LongBench's those of its
paper (arXiv 2308.14508, table 1) and evaluation script. ROUGE-L takes the package that LongBench uses,
`rouge`, and Chinese text needs `jieba`; both are optional, and a data set that needs an absent one says so.
"""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from bench_longctx.quality.cases import Case
from bench_longctx.tasks import structured
from herald.errors import UsageError

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～､、〃》「」『"
    "』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def items(answer: str, case: Case) -> float:
    """Share of the expected items at their places in the answer's first line, comma-separated (the six tasks
    of `bench_longctx.tasks`); a single item must be the whole line."""
    line = answer.strip().split("\n")[0].strip()
    if len(case.references) == 1:
        return float(line == case.references[0])
    given = [part.strip() for part in line.split(",")]
    right = sum(a == b for a, b in zip(case.references, given))
    return right / max(len(case.references), len(given))


def all_references(answer: str, case: Case) -> float:
    """Share of the references that occur in the answer, case aside (RULER: all tasks but QA)."""
    low = answer.lower()
    return sum(reference.lower() in low for reference in case.references) / len(case.references)


def any_reference(answer: str, case: Case) -> float:
    """1 if a reference occurs in the answer, case aside (RULER: QA)."""
    low = answer.lower()
    return float(any(reference.lower() in low for reference in case.references))


def json_values(answer: str, case: Case) -> float:
    """Share of the asked keys whose value is right (ours): see `structured.values_right`."""
    return structured.values_right(answer, case.facts, case.references)


def own_pairs(answer: str, case: Case) -> float:
    """Share of the pairs written or asked for that are the document's, each counted once (ours): see
    `structured.pairs_right`."""
    return structured.pairs_right(answer, case.facts, case.asked)


def qa_f1(answer: str, case: Case) -> float:
    """Token F1 after SQuAD's normalisation, best over the references (LongBench: question answering)."""
    return max(_f1(_normal_words(answer), _normal_words(reference)) for reference in case.references)


def qa_f1_zh(answer: str, case: Case) -> float:
    """The same on words that jieba cuts (LongBench: Chinese question answering)."""
    return max(_f1(_chinese_words(answer), _chinese_words(reference)) for reference in case.references)


def rouge_l(answer: str, case: Case) -> float:
    """ROUGE-L F, best over the references, by the package `rouge` (LongBench: summaries)."""
    return max(_rouge(answer, reference) for reference in case.references)


def rouge_l_zh(answer: str, case: Case) -> float:
    """The same on words that jieba cuts (LongBench: Chinese summaries)."""
    jieba = _package("jieba")
    cut = lambda text: " ".join(jieba.cut(text, cut_all=False))  # noqa: E731
    return max(_rouge(cut(answer), cut(reference)) for reference in case.references)


def classification(answer: str, case: Case) -> float:
    """1 / the number of labels in the answer if the right one is among them; a label that is part of the
    right one's name is none of its own (LongBench: trec, lsht). Best over the references."""

    def score(reference: str) -> float:
        named = [label for label in case.classes if label in answer]
        named = [label for label in named if label == reference or label not in reference]
        return 1 / len(named) if reference in named else 0.0

    return max(score(reference) for reference in case.references)


def retrieval(answer: str, case: Case) -> float:
    """Share of the numbers in the answer that are the paragraph's (LongBench: passage_retrieval_en)."""
    return max(_number_share(answer, reference, r"Paragraph (\d+)") for reference in case.references)


def retrieval_zh(answer: str, case: Case) -> float:
    """The same for Chinese (LongBench: passage_retrieval_zh)."""
    return max(_number_share(answer, reference, r"段落(\d+)") for reference in case.references)


def count(answer: str, case: Case) -> float:
    """Share of the numbers in the answer that are the right one (LongBench: passage_count)."""
    return max(_number_share(answer, reference, r"(\d+)") for reference in case.references)


def code_similarity(answer: str, case: Case) -> float:
    """Edit similarity of the first line of code (LongBench: lcc, repobench-p), in whole per cent as
    `fuzzywuzzy` gives it without a compiled extension."""
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")
    return max(_ratio(line, reference) for reference in case.references)


def _ratio(first: str, second: str) -> float:
    if not first or not second:
        return 0.0
    return round(100 * SequenceMatcher(None, first, second).ratio()) / 100


def _number_share(answer: str, reference: str, pattern: str) -> float:
    wanted = re.findall(pattern, reference)
    numbers = re.findall(r"\d+", answer)
    return sum(number == wanted[0] for number in numbers) / len(numbers) if numbers and wanted else 0.0


def _normal_words(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _chinese_words(text: str) -> list[str]:
    jieba = _package("jieba")
    drop = set(string.punctuation + _CHINESE_PUNCTUATION)
    words = ("".join(c for c in word.lower() if c not in drop) for word in jieba.cut(text, cut_all=False))
    return [word for word in ("".join(word.split()) for word in words) if word]


def _f1(given: list[str], wanted: list[str]) -> float:
    same = sum((Counter(given) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(given), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _rouge(answer: str, reference: str) -> float:
    rouge = _package("rouge")
    try:
        return float(rouge.Rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # what the package says of an empty or endless text
        return 0.0


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"this metric needs the package {name!r}", f"run: pip install {name}") from error


# Packages that a metric needs beside ours.
_PACKAGES = {"rouge_l": ("rouge",), "rouge_l_zh": ("rouge", "jieba"), "qa_f1_zh": ("jieba",)}


def require(metric: str) -> None:
    """Check, before anything is computed, that a metric can be.

    Raises:
        UsageError: a package is missing; says how to install it.
    """
    for name in _PACKAGES.get(metric, ()):
        _package(name)


METRICS: dict[str, Callable[[str, Case], float]] = {
    "items": items,
    "all_references": all_references,
    "any_reference": any_reference,
    "json": json_values,
    "pairs": own_pairs,
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code_similarity": code_similarity,
}


def score(answer: str, case: Case) -> float:
    """The case's metric of an answer."""
    if case.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return METRICS[case.metric](answer, case)

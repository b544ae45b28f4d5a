"""Metrics against values worked out by hand."""

from __future__ import annotations

import importlib.util

import pytest

from bench_longctx.quality import metrics
from bench_longctx.quality.cases import Case
from bench_longctx.tasks import structured
from herald.errors import UsageError


def case(*references: str, metric: str = "all_references", **more: object) -> Case:
    return Case("t", "", references, metric, 10, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer, expected",
    [("Alpha and BETA", 1.0), ("only beta", 0.5), ("neither", 0.0)],
)
def test_all_references(answer, expected):
    assert metrics.score(answer, case("alpha", "beta")) == expected


def test_any_reference():
    assert metrics.score("It is Alpha.", case("alpha", "beta", metric="any_reference")) == 1
    assert metrics.score("gamma", case("alpha", "beta", metric="any_reference")) == 0


@pytest.mark.parametrize(
    "answer, expected",
    [(" 12, 34\nmore", 1.0), ("12, 35", 0.5), ("12", 0.5), ("12, 34, 56", 2 / 3), ("34, 12", 0.0)],
)
def test_items(answer, expected):
    assert metrics.score(answer, case("12", "34", metric="items")) == pytest.approx(expected)


def test_one_item_is_the_whole_line():
    assert metrics.score(" one, two.\n", case("one, two.", metric="items")) == 1
    assert metrics.score(" one", case("one, two.", metric="items")) == 0


FACTS = {"the harbour": "1", "gate": "22", "mill": "333"}


@pytest.mark.parametrize(
    "answer, expected",
    [
        ('Here: {"the harbour": "1", "gate": "22"} done', 1.0),
        ('{"gate": 22}', 0.5),
        ('{"the harbour": "1", "gate": "2', 0.5),
        ('{"the harbour": "1", "gate": "22", "mill": "333"}', 2 / 3),
        ("no object", 0.0),
    ],
)
def test_json_values(answer, expected):
    found = metrics.score(answer, case("1", "22", metric="json", facts=FACTS))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "answer, counts, expected",
    [
        (" Harbour: 1; gate: 22", (2, 2), 1),
        (" gate: 22; Harbour: 1\n", (2, 2), 1),
        ("1. gate: 22\n- mill: 999\n", (1, 2), 1 / 2),
        ("gate: 22; gate: 22", (1, 2), 1 / 2),
        ("gate: 22", (1, 1), 1 / 2),
        ("gate: 22; mill: 333; the harbour: 1", (3, 3), 2 / 3),
        ("gate: 22; mill: 333; tower: 5", (2, 3), 2 / 3),
        ("tower: 5", (0, 1), 0),
        ("gate", (0, 0), 0),
    ],
)
def test_own_pairs(answer, counts, expected):
    asked = case(metric="pairs", facts=FACTS, asked=2)
    assert structured.pair_counts(answer, FACTS) == counts
    assert metrics.score(answer, asked) == pytest.approx(expected)


def test_qa_f1():
    # {quick, brown, fox} and {brown, fox, jumps, high}: 2 in common, P = 2/3, R = 1/2
    asked = case("brown fox jumps high", "nothing", metric="qa_f1")
    assert metrics.score("The quick, brown fox!", asked) == pytest.approx(4 / 7)
    assert metrics.score("An answer", case("the answer.", metric="qa_f1")) == 1


def test_classification():
    labels = ("Food", "Fast Food", "Animal")
    assert metrics.score("Animal", case("Animal", metric="classification", classes=labels)) == 1
    assert metrics.score("Animal or Food", case("Animal", metric="classification", classes=labels)) == 0.5
    # "Food" is part of the right label's name, so it is no second one
    assert metrics.score("Fast Food", case("Fast Food", metric="classification", classes=labels)) == 1
    assert metrics.score("Plant", case("Animal", metric="classification", classes=labels)) == 0


def test_retrieval_and_count():
    assert metrics.score("Paragraph 7, not 3", case("Paragraph 7", metric="retrieval")) == 0.5
    assert metrics.score("none", case("Paragraph 7", metric="retrieval")) == 0
    assert metrics.score("段落12", case("段落12", metric="retrieval_zh")) == 1
    assert metrics.score("12 of 15 and 12", case("12", metric="count")) == pytest.approx(2 / 3)


def test_code_similarity():
    # 4 of 4 + 4 characters match in "abcd"/"abcf": 2 * 3 / 8 = .75; lines of comments are passed over
    asked = case("abcd", metric="code_similarity")
    assert metrics.score("\n# comment\nabcf\nabcd", asked) == 0.75
    assert metrics.score("", asked) == 0


def test_first_line_only():
    asked = case("Animal", metric="classification", classes=("Animal", "Food"), first_line=True)
    assert metrics.score("\nAnimal\nFood", asked) == 1


@pytest.mark.skipif(importlib.util.find_spec("rouge") is None, reason="needs the package rouge")
def test_rouge_l():
    # the longest common subsequence of "the cat sat" and "the cat ran fast" is 2: P = 2/3, R = 2/4
    assert metrics.score("the cat sat", case("the cat ran fast", metric="rouge_l")) == pytest.approx(
        4 / 7, 1e-2
    )
    assert metrics.score("", case("the cat", metric="rouge_l")) == 0


def test_absent_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rouge", None)
    with pytest.raises(UsageError, match="needs the package 'rouge'; run: pip install rouge"):
        metrics.score("a", case("a", metric="rouge_l"))

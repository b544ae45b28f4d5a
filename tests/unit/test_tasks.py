"""The retrieval tasks: answers follow from the documents, and everything from the seed."""

from __future__ import annotations

import random
import re

import pytest

from bench_longctx import tasks
from bench_longctx.tasks.haystack import Haystack


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack.load()


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("length", [1024, 8192])
def test_answer_stands_in_the_document(task, length, haystack):
    for seed in range(20):
        example = tasks.make(task, length, random.Random(seed), haystack)
        document = example.prompt.encode()[: example.meta["document_bytes"]].decode()
        assert 0.6 * length < len(example.prompt.encode()) <= length
        assert example.prompt.endswith(("Answer:", "A:"))
        for item in example.meta["items"]:
            assert item in document
        assert tasks.score(example, tasks.completion(example)) == (True, 1.0)


def test_same_seed_gives_the_same_example(haystack):
    first, second = (tasks.make("keys", 2048, random.Random(3), haystack) for _ in range(2))
    assert first == second


def test_chain_holds_when_executed(haystack):
    for seed in range(20):
        example = tasks.make("chain", 2048, random.Random(seed), haystack)
        document = example.prompt[: example.meta["document_bytes"]]
        memory: dict[str, str] = {}
        for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", document):
            memory[name] = memory.get(source, source)
        value = memory[example.meta["items"][0]]
        assert [n for n in memory if memory[n] == value] == example.meta["items"]


def test_values_come_in_document_order(haystack):
    for seed in range(20):
        example = tasks.make("values", 4096, random.Random(seed), haystack)
        document = example.prompt[: example.meta["document_bytes"]]
        places = [document.rindex(item) for item in example.meta["items"]]
        assert places == sorted(places)


def test_score_counts_items(haystack):
    example = tasks.Example("", "12, 34", "values", {"items": ["12", "34"]})
    assert tasks.score(example, " 12, 35\n") == (False, 0.5)
    assert tasks.score(example, " 12") == (False, 0.5)


def test_refusals(haystack):
    with pytest.raises(ValueError, match="task='poem'"):
        tasks.make("poem", 1024, random.Random(0), haystack)
    with pytest.raises(ValueError, match="at least 512"):
        tasks.make("keys", 100, random.Random(0), haystack)

"""The retrieval tasks: answers follow from the documents, and everything from the seed."""

from __future__ import annotations

import hashlib
import json
import random
import re

import pytest

from bench_longctx import tasks
from bench_longctx.tasks import structured
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


DIGESTS = {
    "needle": "c444cd4b9480bea8",
    "keys": "dbf2ab912ad7e909",
    "values": "118e530187544a0e",
    "queries": "22b1212f952981dd",
    "chain": "21d93dc753e7186f",
    "sentence": "cf4bea5850ecb285",
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_documents_stay_what_results_were_measured_on(task, haystack):
    digest = hashlib.sha256()
    for length in (2048, 8192):
        for number in range(3):
            example = tasks.make(task, length, random.Random(f"7 {length} {task} {number}"), haystack)
            digest.update(f"{example.prompt}\0{example.answer}\0".encode())
    assert digest.hexdigest()[:16] == DIGESTS[task]


@pytest.mark.parametrize("task", structured.TASKS)
@pytest.mark.parametrize("length", [1024, 2048, 8192])
def test_structured_answer_follows_from_the_document(task, length, haystack):
    for seed in range(10):
        example = structured.make(task, length, random.Random(seed), haystack)
        document = example.prompt.encode()[: example.meta["document_bytes"]].decode()
        assert 0.5 * length < len(example.prompt.encode()) <= length
        assert example.prompt.endswith(("Answer:", "A:"))
        assert len(example.meta["items"]) == example.meta["asked"] <= len(example.meta["facts"])
        for key, value in example.meta["facts"].items():
            assert key.lower() in document.lower() and value in document
        again = structured.make(task, length, random.Random(seed), haystack)
        assert again == example


def test_structured_answers_in_their_own_form(haystack):
    example = structured.make("json", 2048, random.Random(5), haystack)
    given = json.loads(example.answer)
    assert given.items() <= example.meta["facts"].items()
    assert all(key in example.prompt[example.meta["document_bytes"] :] for key in given)
    example = structured.make("pairs", 2048, random.Random(5), haystack)
    pairs = dict(pair.split(": ", 1) for pair in example.answer.split("; "))
    assert pairs.items() <= example.meta["facts"].items()


def test_structured_answers_score_themselves(haystack):
    for task in structured.TASKS:
        for seed in range(20):
            example = structured.make(task, 4096, random.Random(seed), haystack)
            assert structured.score(example, tasks.completion(example)) == (True, 1.0)
            assert len(tasks.completion(example).encode()) < structured.ANSWER_BYTES
            spoilt = example.answer.replace(example.meta["items"][-1], "0-0-0")
            share = 1 - 1 / example.meta["asked"]
            assert structured.score(example, spoilt) == (False, pytest.approx(share))
            shorter = example.answer[: example.answer.rindex(example.meta["items"][-1])]
            assert structured.score(example, shorter)[1] == pytest.approx(share)


def test_structured_refusals(haystack):
    with pytest.raises(ValueError, match="task='poem'"):
        structured.make("poem", 2048, random.Random(0), haystack)
    with pytest.raises(ValueError, match="at least 1024"):
        structured.make("json", 600, random.Random(0), haystack)

"""RULER's tasks: references stand in the text, lengths hold, and everything follows from the seed."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from bench_longctx import tasks
from bench_longctx.quality import cases, metrics
from bench_longctx.tasks import forms, qa, ruler, structured
from bench_longctx.tasks.forms import BytesForm, Parts, TokensForm, largest_fit
from bench_longctx.tasks.haystack import Haystack
from herald.errors import InvalidOption, UsageError


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("unit", ["tokens", "bytes"])
def test_references_stand_in_the_context(task, unit, tokens: TokensForm, haystack: Haystack):
    form = tokens if unit == "tokens" else BytesForm()
    for seed in ("1", "2"):
        made = ruler.make(task, 8192, seed, form, haystack)
        assert 0.85 * 8192 < form.length(made.prompt) <= 8192
        assert all(reference in made.prompt.text for reference in made.references)
        assert made == ruler.make(task, 8192, seed, form, haystack)
        if unit == "tokens":
            assert made.prompt.ids is not None and len(made.prompt.ids) == form.length(made.prompt)


def test_other_seeds_give_other_prompts(tokens: TokensForm, haystack: Haystack):
    prompts = {ruler.make("niah_single_2", 2048, str(i), tokens, haystack).prompt.text for i in range(5)}
    assert len(prompts) == 5


@pytest.mark.parametrize(
    "task, references, keys",
    [
        ("niah_single_1", 1, 1),
        ("niah_multikey_1", 1, 4),
        ("niah_multivalue", 4, 1),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_are_as_many_as_the_paper_says(task, references, keys, haystack: Haystack):
    made = ruler.make(task, 6000, "3", BytesForm(), haystack)
    said = dict.fromkeys(re.findall(r"special magic numbers for (\S+) is: (\d{7})\.", made.prompt.text))
    assert len(made.references) == len(set(made.references)) == references
    assert len({key for key, _ in said}) == keys
    # the question names exactly the keys whose values are expected
    question = made.prompt.text[made.prompt.text.rindex("\n\nQuestion:") :]
    assert {value for key, value in said if key in question} == set(made.references)


def test_needles_among_needles(haystack: Haystack):
    made = ruler.make("niah_multikey_3", 6000, "3", BytesForm(), haystack)
    uuids = re.findall(r"UUIDs for (\S+) is: (\S+)\.", made.prompt.text)
    assert len(uuids) > 30
    key = re.search(r"UUID for (\S+) that the text gives\?", made.prompt.text)
    assert key is not None and dict(uuids)[key[1]] == made.references[0]


def test_variables_hold_the_value_when_executed(haystack: Haystack):
    made = ruler.make("vt", 4096, "5", BytesForm(), haystack)
    body = made.prompt.text[made.prompt.text.index("Now the text itself.") :]
    memory: dict[str, str] = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", body):
        memory[name] = memory.get(source, source)
    value = re.search(
        r"assigned the value (\d{5}) in the text above, directly or through others\?$", body, re.M
    )
    assert value is not None
    assert [name for name in memory if memory[name] == value[1]] == list(made.references)
    assert len(made.references) == 5


def test_common_words_are_the_common_ones(haystack: Haystack):
    made = ruler.make("cwe", 30_000, "5", BytesForm(), haystack)
    body = made.prompt.text[made.prompt.text.index("Now the list itself.") :]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", body))
    assert {word for word, _ in counts.most_common(10)} == set(made.references)
    assert set(counts.values()) == {30, 3}


def test_frequent_words_are_the_frequent_ones(haystack: Haystack):
    made = ruler.make("fwe", 8192, "5", BytesForm(), haystack)
    body = made.prompt.text.split("\n\n")[1]
    counts = Counter(body.split(" "))
    assert [word for word, _ in counts.most_common(4)] == ["...", *made.references]


def test_bundled_questions_are_answered_by_one_passage(haystack: Haystack):
    passages = qa.bundled(haystack)
    assert passages.source == "bundled" and len(passages.asked) > 500
    asked = random.Random(0).choice(passages.asked)
    assert asked.answers[0] in passages.texts[asked.passages[0]]
    assert sum(asked.answers[0] in text for text in passages.texts) == 1
    parts, answers = passages.ask(6, random.Random(1))
    assert parts.context.count("Document ") == 7 and answers[0] in parts.context


def test_question_sets_of_the_user(tmp_path: Path):
    paragraphs = [
        {
            "context": "The river runs to Bremen.",
            "qas": [
                {"question": "Where does it run?", "answers": [{"text": "Bremen"}], "is_impossible": False},
                {"question": "Who?", "answers": [], "is_impossible": True},
            ],
        },
        {"context": "Nothing.", "qas": []},
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    squad = qa.load("qa_1", tmp_path)
    assert squad is not None and squad.source == "squad.json"
    assert squad.asked == (qa.Asked("Where does it run?", ("Bremen",), (0,)),)
    entry = {
        "question": "Which?",
        "answer": "blue",
        "context": [["Sky", ["It is blue."]], ["Sea", ["It is deep."]]],
        "supporting_facts": [["Sky", 0]],
    }
    (tmp_path / "hotpotqa.json").write_text(json.dumps([entry]))
    hotpot = qa.load("qa_2", tmp_path)
    assert hotpot is not None and hotpot.asked[0].passages == (0,)
    assert hotpot.texts == ("Sky\nIt is blue.", "Sea\nIt is deep.")
    assert qa.load("qa_1", tmp_path / "none") is None
    (tmp_path / "squad.json").write_text("[1]")
    with pytest.raises(UsageError, match="squad.json is not the published file"):
        qa.load("qa_1", tmp_path)


def test_byte_form_is_the_frame_of_tiny():
    prompt = BytesForm().assemble(Parts("Do.", "Long.", "What?", "It is"))
    assert prompt == forms.Prompt("Do.\n\nLong.\n\nQuestion: What?\nAnswer:", None)


def test_token_form_uses_the_template(tokens: TokensForm):
    prompt = tokens.assemble(Parts("Do.", "Long.", "What?", "It is"))
    assert prompt.ids is not None
    assert tokens.tokenizer.decode(prompt.ids) == "Do.\nLong.\nWhat?\nAnswer:It is"
    plain = TokensForm(tokens.tokenizer, chat=False).assemble(Parts("Do.", "Long.", "What?", "It is"))
    assert plain.text == "Do.\nLong.\nWhat? It is"
    assert tokens.tokenizer.decode(plain.ids or ()) == plain.text


@pytest.mark.parametrize("slope, base", [(1, 0), (7, 100), (40, 300)])
def test_largest_fit(slope, base):
    asked: list[int] = []

    def measure(count: int) -> int:
        asked.append(count)
        return base + slope * count

    best = largest_fit(measure, 5000, 10**6)
    assert 0.98 * 5000 - slope < measure(best) <= 5000
    assert len(asked) < 12
    assert largest_fit(measure, 5000, 3) == 3
    with pytest.raises(ValueError, match="too short"):
        largest_fit(lambda count: 6000, 5000, 10)


def test_largest_fit_of_uneven_units():
    rng = random.Random(3)
    sizes = [rng.choice((1, 500)) for _ in range(400)]
    best = largest_fit(lambda count: sum(sizes[:count]), 5000, 400)
    assert sum(sizes[:best]) <= 5000
    assert sum(sizes[:best]) > 4900 or sum(sizes[: best + 1]) > 5000


def test_cases_are_the_same_for_every_method(tokens: TokensForm):
    for form, task in ((BytesForm(), "keys"), (BytesForm(), "json"), (tokens, "niah_single_2")):
        first = cases.generate(task, 2048, 3, 7, form, 32768)
        assert first == cases.generate(task, 2048, 3, 7, form, 32768)
        assert len({case.prompt for case in first}) == 3


def test_cases_of_the_six_tasks_are_the_documents_of_old():
    made = cases.generate("keys", 2048, 2, 7, BytesForm(), 32768)
    for number, case in enumerate(made):
        rng = random.Random(f"7 2048 keys {number}")
        assert case.prompt == tasks.make("keys", 2048, rng, Haystack.load()).prompt


def test_cases_leave_room_for_the_answer(tokens: TokensForm):
    (case,) = cases.generate("keys", 32768, 1, 7, BytesForm(), 32768)
    assert len(case.prompt.encode()) + case.max_tokens <= 32768
    (case,) = cases.generate("json", 4096, 1, 7, tokens, 4096)
    assert case.ids is not None and len(case.ids) + case.max_tokens <= 4096


def test_refusals(tokens: TokensForm):
    with pytest.raises(InvalidOption, match="task='poem' is not generated in bytes"):
        cases.generate("poem", 2048, 1, 7, BytesForm(), 32768)
    with pytest.raises(InvalidOption, match="task='needle' is not generated in tokens"):
        cases.generate("needle", 2048, 1, 7, tokens, 32768)
    with pytest.raises(InvalidOption, match="too short"):
        cases.generate("niah_single_1", 100, 1, 7, tokens, 32768)


@pytest.mark.parametrize("task", ["json", "pairs"])
def test_structured_cases_in_bytes(task, haystack: Haystack):
    limit = 8192
    for number, case in enumerate(cases.generate(task, 8192, 6, 7, BytesForm(), limit, max_tokens=64)):
        assert case.metric == case.task == task and case.max_tokens == structured.ANSWER_BYTES
        assert len(case.prompt.encode()) <= limit - case.max_tokens
        example = structured.make(task, limit - 288, random.Random(f"7 8192 {task} {number}"), haystack)
        assert case.prompt == example.prompt and case.asked == len(case.references) >= 2
        assert metrics.score(tasks.completion(example), case) == 1
        assert metrics.score(" " + example.answer[: len(example.answer) // 2], case) < 1
    longer = cases.generate(task, 2048, 1, 7, BytesForm(), limit, max_tokens=400)
    assert longer[0].max_tokens == 400

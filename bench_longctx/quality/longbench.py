"""LongBench's data sets (Bai et al. 2023, arXiv 2308.14508): prompts, answer lengths and metrics.

Answer lengths, metrics, and which sets are asked without a chat template, are as published. The prompts are
in our words with the same parts in the same order, so figures are comparable between methods and close to,
not equal to, published ones; put the published ``dataset2prompt.json`` beside the data to use its prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bench_longctx.tasks.forms import Prompt, TokensForm
from herald.errors import UsageError


class Dataset(NamedTuple):
    """How a data set is asked and scored.

    Attributes:
        metric: a name of `metrics.METRICS`.
        max_tokens: an answer may take.
        template: prompt with ``{context}`` and ``{input}``.
        chat: the prompt goes through the chat template.
        first_line: only the answer's first line counts.
    """

    metric: str
    max_tokens: int
    template: str
    chat: bool = True
    first_line: bool = False


def _reading(what: str, how: str) -> str:
    return (
        f"Below is {what}. Answer the question about it, {how}, and say nothing else.\n\n{{context}}\n\n"
        f"Again: answer the question, {how}, and say nothing else.\n\nQuestion: {{input}}\n\nAnswer:"
    )


def _summary(what: str, name: str, question: str = "") -> str:
    return f"Below is {what}. {name}\n\n{{context}}\n\n{question}{name}\n\nSummary:"


_SHORT = "in as few words as you can"
_PASSAGES = "a number of passages"
_READ_ZH = (
    "阅读以下文字，用中文简短回答问题，只给出答案。\n\n{context}\n\n"
    "只根据上面的文字回答，不要输出其他内容。\n\n问题：{input}\n答案："
)
_CODE = "Complete the code below with its next line.\n{context}{input}Next line of code:\n"

DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset("qa_f1", 128, _reading("a story: a novel or the script of a film", _SHORT)),
    "qasper": Dataset(
        "qa_f1",
        128,
        _reading(
            "a scientific article",
            f'{_SHORT}, with "unanswerable" if the article does not say, or with "yes", "no" or '
            '"unanswerable" to a yes-or-no question',
        ),
    ),
    "multifieldqa_en": Dataset("qa_f1", 64, _reading("a text", _SHORT)),
    "multifieldqa_zh": Dataset("qa_f1_zh", 64, _READ_ZH),
    "hotpotqa": Dataset("qa_f1", 32, _reading(_PASSAGES, _SHORT)),
    "2wikimqa": Dataset("qa_f1", 32, _reading(_PASSAGES, _SHORT)),
    "musique": Dataset("qa_f1", 32, _reading(_PASSAGES, _SHORT)),
    "dureader": Dataset(
        "rouge_l_zh", 128, "根据以下文章回答问题。\n\n文章：{context}\n\n问题：{input}\n答案："
    ),
    "gov_report": Dataset("rouge_l", 512, _summary("a government report", "Sum the report up on one page.")),
    "qmsum": Dataset(
        "rouge_l",
        512,
        _summary(
            "the transcript of a meeting",
            "Answer what is asked about it in a few sentences.",
            "Asked: {input}\n",
        ),
    ),
    "multi_news": Dataset("rouge_l", 512, _summary("news articles", "Sum all the news up on one page.")),
    "vcsum": Dataset("rouge_l_zh", 512, "以下是一段会议记录，请写出总结。\n\n{context}\n\n会议总结："),
    "trec": Dataset(
        "classification",
        64,
        "Name the type of the last question. The others are examples.\n\n{context}\n{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": Dataset(
        "qa_f1",
        32,
        "Answer the last question from its passage, with the answer alone. The others are examples.\n\n"
        "{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "samsum": Dataset(
        "rouge_l",
        128,
        "Sum the last dialogue up in a few short sentences. The others are examples.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "lsht": Dataset(
        "classification", 64, "请给出最后一条新闻的类别，前面是例子。\n\n{context}\n{input}", False, True
    ),
    "passage_count": Dataset(
        "count",
        32,
        "Some of the paragraphs below are repeated. How many different ones are there?\n\n{context}\n\n"
        "Write the number of different paragraphs and nothing else, such as 1, 2 or 3.\n\nNumber:",
    ),
    "passage_retrieval_en": Dataset(
        "retrieval",
        32,
        "Below are 30 paragraphs and a summary of one of them. Which one is it?\n\n{context}\n\n"
        "Summary:\n\n{input}\n\n"
        'Write the number of the paragraph, such as "Paragraph 1" or "Paragraph 2".\n\nAnswer:',
    ),
    "passage_retrieval_zh": Dataset(
        "retrieval_zh",
        32,
        "以下是若干段落和其中一段的摘要，请指出摘要出自哪一段。\n\n{context}\n\n摘要：{input}\n\n"
        "请写出段落编号，格式如“段落1”、“段落2”。\n\n答案：",
    ),
    "lcc": Dataset("code_similarity", 64, _CODE.replace("{input}", ""), chat=False),
    "repobench-p": Dataset("code_similarity", 64, _CODE, chat=False),
}


# Tokens of a cut prompt that has more of its text than of the words around it.
_LEAST = 256


@dataclass(frozen=True)
class Entry:
    """A line of a data set, checked."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def prompt_of(entry: Entry, template: str, chat: bool, form: TokensForm, length: int) -> Prompt:
    """The prompt of at most ``length`` tokens: tokens of its middle are dropped where it is longer, as
    published.

    The chat template comes after the cut, on what is left.

    Raises:
        UsageError: it is longer, and the length has no room for a prompt that is cut.
    """
    # not str.format: prompts of code hold braces
    turn = template.replace("{input}", entry.input).replace("{context}", entry.context)
    spare = form.length(form.assemble_turn("", chat=chat))
    ids = form.tokenizer.encode(turn)
    room = length - spare
    if len(ids) > room:
        if room < _LEAST:
            raise UsageError(
                f"a length of {length} tokens leaves {max(room, 0)} for a prompt that is cut, not {_LEAST}",
                "use a longer --lengths, of a model that has it",
            )
        half = room // 2
        turn = form.tokenizer.decode(ids[:half]) + form.tokenizer.decode(ids[len(ids) - half :])
    return form.assemble_turn(turn, chat=chat)

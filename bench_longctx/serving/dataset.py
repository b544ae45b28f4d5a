"""Long documents with several questions each, as load generators read them.

    python -m bench_longctx.serving.dataset --documents 8 --questions 6 --bytes 16000 --out load.jsonl

A line is a request: ``prompt``, ``output_tokens_count`` (GuideLLM) and ``output_tokens`` (``vllm bench
serve``, dataset ``custom``) besides ``id``, ``document`` and ``answer``. The questions of a document share
its text from the prompt's start: a server that shares prefixes prefills it once.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_longctx.tasks import wording
from bench_longctx.tasks.document import Document
from bench_longctx.tasks.haystack import Haystack

# Bytes left for a question and its frame.
QUESTION_BYTES = 220


def requests(
    documents: int, questions: int, num_bytes: int, output_tokens: int, seed: int, order: str
) -> list[dict[str, Any]]:
    """Requests about ``documents`` documents of about ``num_bytes`` bytes each (never more).

    Args:
        order: ``"grouped"``, a document's questions one after the other, ``"turns"``, one question of each
            document in turn, or ``"shuffled"``.
    """
    haystack = Haystack.load()
    groups = [
        list(
            _document(
                number, questions, num_bytes, output_tokens, random.Random(f"{seed}/{number}"), haystack
            )
        )
        for number in range(documents)
    ]
    if order == "turns":
        return [group[turn] for turn in range(questions) for group in groups]
    many = [request for group in groups for request in group]
    if order == "shuffled":
        random.Random(seed).shuffle(many)
    return many


def _document(
    number: int, questions: int, num_bytes: int, output_tokens: int, rng: random.Random, haystack: Haystack
) -> Iterator[dict[str, Any]]:
    document = Document(rng, haystack)
    facts = [document.add_single() for _ in range(questions)]
    document.render(num_bytes - QUESTION_BYTES)
    frame = wording.frame(rng)
    for turn, fact in enumerate(facts):
        question = document.ask_single("needle", fact)
        yield {
            "id": f"{number}-{turn}",
            "document": number,
            "prompt": document.text + frame.format(q=question.text),
            "answer": question.answer,
            "output_tokens_count": output_tokens,
            "output_tokens": output_tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=6, help="about each document")
    parser.add_argument("--bytes", type=int, default=16_000, help="of a prompt")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--order", choices=("grouped", "turns", "shuffled"), default="shuffled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines")
    args = parser.parse_args()
    many = requests(args.documents, args.questions, args.bytes, args.output_tokens, args.seed, args.order)
    args.out.write_text("".join(json.dumps(each) + "\n" for each in many), "utf-8")
    print(f"{len(many)} requests about {args.documents} documents in {args.out}")


if __name__ == "__main__":
    main()

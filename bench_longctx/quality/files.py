"""Cases from JSONL files that the user has.

``--tasks ruler --data DIR``: what RULER's scripts prepare, ``DIR/<task>/validation.jsonl`` or
``DIR/<task>.jsonl``, a line ``{"input": prompt, "outputs": [reference, ...]}`` with an optional
``"answer_prefix"``. Tasks whose name begins with "qa" are scored as question answering, all others by the
share of references found. Without ``--data`` the tasks are generated.

``--tasks longbench --data DIR``: LongBench's ``DIR/<dataset>.jsonl`` (or ``DIR/data/<dataset>.jsonl``), a
line ``{"input": question, "context": text, "answers": [...], "all_classes": [...] or null}``; with the
published ``dataset2prompt.json`` in DIR, its prompts. Prompts longer than the length asked for lose their
middle.

``--tasks FILE.jsonl``: a line ``{"prompt": text, "answers": [...]}`` with optional ``"metric"`` (a name of
`metrics.METRICS`; "all_references"), ``"max_tokens"`` (128), ``"classes"`` ([]) and ``"task"`` (the file's
name), and nothing else.

Of each file the first ``--count`` lines are taken. Files are UTF-8, with or without a byte order mark. An
error names the file and the line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_longctx.quality import longbench
from bench_longctx.quality.cases import Case
from bench_longctx.quality.metrics import METRICS
from bench_longctx.tasks import ruler
from bench_longctx.tasks.forms import Prompt, PromptForm, TokensForm
from herald.errors import UsageError

PROMPTS_FILE = "dataset2prompt.json"
# What a line of our own format may have.
OWN_KEYS = ("prompt", "answers", "metric", "max_tokens", "classes", "task")


def find_tasks(kind: str, folder: Path) -> list[str]:
    """Names of the tasks of ``kind``, "ruler" or "longbench", that ``folder`` holds.

    Raises:
        UsageError: it is no folder, or holds none.
    """
    if not folder.is_dir():
        raise UsageError(f"--data {folder} is not a folder", f"name the folder that holds the {kind} files")
    if kind == "longbench":
        found = [name for name in longbench.DATASETS if _longbench_file(name, folder) is not None]
        expected = "narrativeqa.jsonl"
    else:
        named = {path.parent.name for path in folder.glob("*/validation.jsonl")}
        found = sorted(named | {path.stem for path in folder.glob("*.jsonl")})
        expected = "niah_single_1/validation.jsonl"
    if not found:
        raise UsageError(f"{folder} holds no file of {kind}", f"put {folder / expected} there")
    return found


def files_of(kind: str, task: str, folder: Path) -> list[Path]:
    """The files in ``folder`` that the cases of a published task are made of."""
    if kind == "ruler":
        return [_ruler_file(task, folder)]
    path, prompts = _longbench_file(task, folder), folder / PROMPTS_FILE
    return ([] if path is None else [path]) + ([prompts] if prompts.is_file() else [])


def digest(paths: Sequence[Path]) -> str:
    """The first 16 hex digits of the SHA-256 of files, one after the other.

    Raises:
        UsageError: one cannot be read.
    """
    digests = b""
    for path in paths:
        try:
            with path.open("rb") as content:
                digests += hashlib.file_digest(content, "sha256").digest()
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error})", "name a file that can be read") from error
    return hashlib.sha256(digests).hexdigest()[:16]


def ruler_cases(task: str, folder: Path, count: int, form: PromptForm, length: int) -> list[Case]:
    """Cases of one published RULER file.

    Raises:
        UsageError: a line is not what it should be, or a prompt is longer than ``length``.
    """
    path = _ruler_file(task, folder)
    kind = task.split("_")[0]
    metric = "any_reference" if kind == "qa" else "all_references"
    cases = []
    for number, line in _lines(path, count):
        turn = _text(line, "input", path, number)
        prefix = _text(line, "answer_prefix", path, number, default="")
        prompt = _assemble(form, turn, prefix.strip())
        size = form.length(prompt)
        if size > length:
            raise UsageError(
                f"{path}:{number}: the prompt has {size} {form.unit}, more than {length}",
                f"use --lengths {size} or more",
            )
        references = _texts(line, "outputs", path, number)
        cases.append(
            Case(
                task,
                prompt.text,
                references,
                metric,
                ruler.MAX_TOKENS.get(kind, 128),
                prompt.ids,
                source=path.name,
            )
        )
    return cases


def longbench_cases(name: str, folder: Path, count: int, form: PromptForm, length: int) -> list[Case]:
    """Cases of one LongBench data set, cut to ``length`` tokens.

    Raises:
        UsageError: a line is not what it should be, or the form counts bytes.
    """
    if not isinstance(form, TokensForm):
        raise UsageError(
            "longbench is asked in tokens", "use --level tokens, with a model that reads English"
        )
    path = _longbench_file(name, folder)
    assert path is not None
    dataset = longbench.DATASETS[name]
    template = _published_prompts(folder).get(name, dataset.template)
    cases = []
    for number, line in _lines(path, count):
        classes = line.get("all_classes")
        entry = longbench.Entry(
            _text(line, "context", path, number),
            _text(line, "input", path, number, default=""),
            _texts(line, "answers", path, number),
            () if classes is None else _texts(line, "all_classes", path, number),
        )
        prompt = longbench.prompt_of(entry, template, dataset.chat, form, length)
        cases.append(
            Case(
                name,
                prompt.text,
                entry.answers,
                dataset.metric,
                dataset.max_tokens,
                prompt.ids,
                classes=entry.classes,
                source=path.name,
                first_line=dataset.first_line,
            )
        )
    return cases


def own_cases(path: Path, count: int, form: PromptForm, length: int) -> list[Case]:
    """Cases of a file in our own format.

    Raises:
        UsageError: the file or a line is not what it should be, or a prompt is longer than ``length``.
    """
    cases = []
    for number, line in _lines(path, count):
        if unknown := [key for key in line if key not in OWN_KEYS]:
            raise UsageError(
                f"{path}:{number}: {unknown[0]!r} is not known", f"use {', '.join(OWN_KEYS)}, or leave it out"
            )
        metric = _text(line, "metric", path, number, default="all_references")
        if metric not in METRICS or metric in ("json", "pairs"):
            usable = [name for name in METRICS if name not in ("json", "pairs")]
            raise UsageError(
                f"{path}:{number}: metric={metric!r} is not known", f"use one of {', '.join(usable)}"
            )
        tokens = line.get("max_tokens", 128)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise UsageError(
                f"{path}:{number}: max_tokens={tokens!r} is not valid", "use a number such as 128"
            )
        prompt = _assemble(form, _text(line, "prompt", path, number), "")
        size = form.length(prompt)
        if size > length:
            raise UsageError(
                f"{path}:{number}: the prompt has {size} {form.unit}, more than {length}",
                f"use --lengths {size} or more",
            )
        answers = _texts(line, "answers", path, number)
        if not all(answer.strip() for answer in answers):
            problem = f"{path}:{number}: an answer is blank, which every text would be right for"
            raise UsageError(problem, 'leave it out of "answers"')
        cases.append(
            Case(
                _text(line, "task", path, number, default=path.stem),
                prompt.text,
                answers,
                metric,
                tokens,
                prompt.ids,
                classes=_texts(line, "classes", path, number, empty=True),
                source=path.name,
            )
        )
    return cases


def _assemble(form: PromptForm, turn: str, prefix: str) -> Prompt:
    if isinstance(form, TokensForm):
        return form.assemble_turn(turn, prefix)
    return Prompt(f"{turn} {prefix}" if prefix else turn)


def _ruler_file(task: str, folder: Path) -> Path:
    path = folder / task / "validation.jsonl"
    return path if path.is_file() else folder / f"{task}.jsonl"


def _longbench_file(name: str, folder: Path) -> Path | None:
    for path in (folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"):
        if path.is_file():
            return path
    return None


def _published_prompts(folder: Path) -> dict[str, str]:
    path = folder / PROMPTS_FILE
    if not path.is_file():
        return {}
    try:
        prompts = json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error})", "download it again, or remove it") from error
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UsageError(f"{path} does not map data sets to prompts", "download it again, or remove it")
    return prompts


def _lines(path: Path, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            taken = 0
            for number, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise UsageError(
                        f"{path}:{number}: not JSON ({error})", "write one object a line"
                    ) from error
                if not isinstance(line, dict):
                    raise UsageError(f"{path}:{number}: not an object", "write one object a line")
                yield number, line
                taken += 1
                if taken == count:
                    return
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error})", "name a JSONL file in UTF-8") from error
    if taken == 0:
        raise UsageError(f"{path} has no line", "name a file with a case in each line")


def _text(line: dict[str, Any], key: str, path: Path, number: int, default: str | None = None) -> str:
    value = line.get(key, default)
    if value is None or not isinstance(value, str):
        raise UsageError(f"{path}:{number}: {key!r} is missing or no text", f'add "{key}": "..."')
    if default is None and not value:
        raise UsageError(f"{path}:{number}: {key!r} is empty", "give it some text")
    return _encodable(value, key, path, number)


def _texts(line: dict[str, Any], key: str, path: Path, number: int, empty: bool = False) -> tuple[str, ...]:
    value = line.get(key, [] if empty else None)
    if (
        not isinstance(value, list)
        or not (value or empty)
        or not all(isinstance(text, str) for text in value)
    ):
        raise UsageError(
            f"{path}:{number}: {key!r} is missing, empty or no list of texts", f'add "{key}": ["..."]'
        )
    return tuple(_encodable(text, key, path, number) for text in value)


def _encodable(text: str, key: str, path: Path, number: int) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{path}:{number}: {key!r} has a lone surrogate at character {error.start}", "write valid Unicode"
        ) from None
    return text

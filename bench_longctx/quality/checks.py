"""What is refused before the first cell, so that nobody waits for half a table to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_longctx.quality import cases, cells, methods, metrics
from bench_longctx.quality.cells import Job, Settings
from bench_longctx.tasks import ruler
from bench_longctx.tasks.forms import PromptForm
from herald import EngineConfig
from herald.config import check as check_option
from herald.errors import InvalidOption, UsageError
from herald.llm import pick_device, pick_dtype
from herald.models import read_config, resolve_model
from herald.tokenizer import Tokenizer

# Documents that are made of a generated task to see whether its length has room: all of a short length, whose
# documents differ in what they need at least and cost little.
_SHORT, _OF_A_LONG_ONE = 4096, 1


def check(settings: Settings, asked: Sequence[tuple[Job, Sequence[str]]]) -> None:
    """Refuse at once what a job would refuse after it has loaded its model.

    Raises:
        UsageError: an unknown method, operator, task, model or device; an option that is out of range; a
            length that the model does not have, or a task has no room in; a file that is missing or not as
            it should be; a package that a metric needs.
        WeightsError: configuration or tokenizer of the model cannot be read.
    """
    _check_options(settings, [job for job, _ in asked])
    shortest: dict[str, int] = {}
    for job, tasks in asked:
        for task in tasks:
            shortest[task] = min(shortest.get(task, job.length), job.length)
    for task in shortest:
        check_task(task, settings)
    path = resolve_model(settings.model)
    limit = cells.limit_of(read_config(path))
    for length in sorted({job.length for job, _ in asked}):
        if not 1 <= length <= limit:
            raise InvalidOption(
                f"--lengths {length} is not valid: {settings.model} has {limit:,} positions for a prompt and "
                "its answer",
                f"use --lengths {limit} or less",
            )
    tokenizer = Tokenizer(path)
    form = cells.form_of(settings, tokenizer)
    for job, tasks in asked:
        for task in tasks:
            if cells.kind_of(task, settings) == "generated":
                cases.check_room(task, job.length, form, limit, settings.max_tokens)
    for task, length in shortest.items():
        _check_documents(task, length, settings, form, tokenizer, limit)


def _check_options(settings: Settings, jobs: Sequence[Job]) -> None:
    pick_dtype(settings.dtype, pick_device(settings.device))
    check_option(settings.seed >= 0, "seed", settings.seed, "use 0 or more")
    EngineConfig(max_num_seqs=settings.batch)
    cells.params_of(settings, settings.max_tokens)
    for job in jobs:
        method = methods.get(job.method)
        methods.operator_part(job.operator, job.index_bits)
        rows = settings.min_resident_rows
        method.offload(job.budget, methods.Switches(job.index_bits, job.operator, job.lookahead_step, rows))


def check_task(task: str, settings: Settings) -> None:
    """Refuse a name that is no task of these settings.

    Raises:
        UsageError: says which there are, or what the file is.
    """
    kind = cells.kind_of(task, settings)
    if kind == "own":
        if Path(task).is_dir():
            raise UsageError(f"{task} is a folder", "name a JSONL file in it")
        if not Path(task).is_file():
            raise UsageError(f"{task} is not there", "name a JSONL file")
    in_bytes = settings.level == "bytes"
    if kind == "longbench" and in_bytes:
        raise UsageError(
            "longbench is asked in tokens", "use --level tokens, with a model that reads English"
        )
    generated = (*cases.BYTE_TASKS, *ruler.TASKS) if in_bytes else cases.TOKEN_TASKS
    if kind == "generated" and task not in generated:
        known = ", ".join(dict.fromkeys(generated))
        raise InvalidOption(
            f"task={task!r} is not generated in {settings.level}", f"use {known}, or a .jsonl file"
        )


def _check_documents(
    task: str, length: int, settings: Settings, form: PromptForm, tokenizer: Tokenizer, limit: int
) -> None:
    """Make the documents of a task at its shortest length, of a long generated one a first one."""
    if cells.kind_of(task, settings) == "generated":
        count = settings.count if length <= _SHORT and form.unit == "bytes" else _OF_A_LONG_ONE
        cells.cases_of(task, length, replace(settings, count=min(count, settings.count)), form, limit)
        return
    made = cells.cases_of(task, length, settings, form, limit)
    for metric in {case.metric: None for case in made}:
        metrics.require(metric)
    for number, case in enumerate(made, 1):
        size = len(cells.ids_of(case, tokenizer))
        if size + case.max_tokens > limit:
            raise UsageError(
                f"case {number} of {task} has a prompt of {size:,} tokens, which with max_tokens="
                f"{case.max_tokens:,} is more than the {limit:,} positions of {settings.model}",
                f"use a prompt of at most {max(limit - case.max_tokens, 1):,} tokens, or fewer max_tokens",
            )


def check_unused(
    settings: Settings, jobs: Sequence[Job], bits: bool, operator: bool, lookahead_step: bool
) -> None:
    """Refuse options that no method or task would look at.

    Args:
        bits, operator, lookahead_step: the option was given.

    Raises:
        UsageError: names the option.
    """
    asked = list(dict.fromkeys(job.method for job in jobs))
    users = {
        "--index-bits": [method.name for method in methods.ALL if bits and method.uses_index],
        "--operator": [method.name for method in methods.ALL if operator and method.uses_operator],
        "--lookahead-step": ["lookahead_k"] if lookahead_step else [],
    }
    for option, names in users.items():
        if names and not set(names) & set(asked):
            raise UsageError(
                f"{option} is unused by {', '.join(asked)}",
                f"leave it out, or use it with {', '.join(names)}",
            )
    if settings.data is not None:
        tasks = cells.task_names(settings)
        own = [task for task in tasks if cells.kind_of(task, settings) == "own"]
        if not any(cells.sources_of(task, settings) for task in tasks if task not in own):
            raise UsageError(
                f"--data {settings.data} is unused by --tasks {' '.join(settings.tasks)}",
                "leave it out, or use --tasks ruler or longbench, or qa_1 or qa_2 with their files there",
            )

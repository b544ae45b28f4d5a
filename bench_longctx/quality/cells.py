"""Cells: one method at one budget and length on one task, run on the real engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench_longctx.quality import cases, files, methods, metrics
from bench_longctx.quality.cases import Case
from bench_longctx.quality.statistics import wilson
from bench_longctx.tasks import ruler, structured
from bench_longctx.tasks.forms import BytesForm, PromptForm, TokensForm
from herald import LLM, EngineConfig, RequestOutput, SamplingParams
from herald.engine.trace import Span
from herald.errors import InvalidOption, UsageError

# The share of a score above which it counts as right: the metrics divide.
_WHOLE = 1 - 1e-9


@dataclass(frozen=True)
class Settings:
    """What all cells of a report have in common; a report goes on only with the same ones.

    Attributes:
        level: "bytes" or "tokens", in which lengths are given.
        tasks: names, or one of "ruler" and "longbench", or a JSONL file.
        data: folder of the user's files, or None.
        count: documents of each task.
        batch: requests that decode together.
        max_tokens: of the tasks in bytes.
        threshold: confidence threshold of decoding.
        denoising_steps: a fixed number of steps a block in its place, 0 for the threshold.
    """

    model: str
    device: str
    dtype: str
    level: str
    tasks: tuple[str, ...]
    data: str | None
    chat: bool
    count: int
    seed: int
    batch: int
    max_tokens: int
    threshold: float
    denoising_steps: int
    min_resident_rows: int


@dataclass(frozen=True)
class Job:
    """A method at a budget (1.0 for `dense`) and a length, with its switches; one engine runs all its
    tasks."""

    method: str
    budget: float
    length: int
    index_bits: int = 8
    operator: str = "max"
    lookahead_step: int = 0

    def key(self, task: str) -> str:
        """Names a cell within a report."""
        return " ".join(map(str, (*asdict(self).values(), task)))


def level_of(level: str, model: str) -> str:
    """ "bytes" or "tokens" for the option "auto": `tiny` reads bytes."""
    return level if level != "auto" else "bytes" if model == "tiny" else "tokens"


def task_names(settings: Settings) -> list[str]:
    """The tasks of a report, one name a cell. Files keep their path.

    Raises:
        UsageError: a name is not known, or files are missing.
    """
    names: list[str] = []
    for name in settings.tasks:
        if name in ("ruler", "longbench") and settings.data is not None:
            names += files.find_tasks(name, Path(settings.data))
        elif name == "longbench":
            raise UsageError(
                "--tasks longbench needs its files", "add --data DIR, the folder that holds them"
            )
        elif name == "ruler":
            names += ruler.RULER_TASKS if settings.level == "tokens" else _RULER_IN_BYTES
        else:
            names.append(name)
    return list(dict.fromkeys(names))


# RULER's tasks in the wording of `tiny`: one needle, many keys, many values, many queries, variable tracking,
# then common words, frequent words and question answering.
_RULER_IN_BYTES = ("needle", "keys", "values", "queries", "chain", "cwe", "fwe", "qa_1")


def cases_of(task: str, length: int, settings: Settings, form: PromptForm, limit: int) -> list[Case]:
    """The cases of a task, the same for every method.

    Args:
        limit: positions that the model has.
    """
    count, folder = settings.count, None if settings.data is None else Path(settings.data)
    if task.endswith(".jsonl"):
        return files.own_cases(Path(task), count, form, length)
    if folder is not None and "longbench" in settings.tasks and task not in settings.tasks:
        return files.longbench_cases(task, folder, count, form, min(length, limit - 512))
    if folder is not None and "ruler" in settings.tasks and task not in settings.tasks:
        return files.ruler_cases(task, folder, count, form, length)
    return cases.generate(task, length, count, settings.seed, form, limit, settings.max_tokens, folder)


def run_job(
    job: Job, settings: Settings, tasks: Sequence[str], threads: int, said: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run tasks of a job one after the other on one engine; (key, cell) of each as it is done."""
    method = methods.get(job.method)
    rows = settings.min_resident_rows
    switches = methods.Switches(job.index_bits, job.operator, job.lookahead_step, rows, threads)
    with LLM(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        offload=method.offload(job.budget, switches),
        engine=EngineConfig(max_num_seqs=settings.batch),
        seed=settings.seed,
    ) as llm:
        if job.method != "dense":
            methods.attach(llm.engine, *methods.operator_part(job.operator, job.index_bits), method)
        form = BytesForm() if settings.level == "bytes" else TokensForm(llm.tokenizer, settings.chat)
        block = llm.model.config.block_length
        limit = llm.engine.max_model_len // block * block
        for task in tasks:
            made = cases_of(task, job.length, settings, form, limit)
            llm.engine.trace.clear()
            began = time.perf_counter()
            outputs = generate(llm, made, settings)
            cell = cell_of(made, outputs, time.perf_counter() - began)
            cell["cost"] |= lookahead_steps(llm.engine.trace.spans())
            said(f"{job.key(task)}: {cell['score']:.1%} in {cell['seconds']:.0f} s")
            yield job.key(task), {**asdict(job), "task": task, **cell}


def generate(llm: LLM, made: Sequence[Case], settings: Settings) -> list[RequestOutput]:
    """Answers of all cases, in one batch."""
    fixed = settings.denoising_steps > 0
    params = [
        SamplingParams(
            max_tokens=case.max_tokens,
            confidence_threshold=None if fixed else settings.threshold,
            denoising_steps=settings.denoising_steps,
        )
        for case in made
    ]
    encode = llm.tokenizer.encode
    ids = [list(case.ids) if case.ids is not None else encode(case.prompt) for case in made]
    return llm.generate(prompt_token_ids=ids, sampling_params=params)


def cell_of(made: Sequence[Case], outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    """Scores and costs of one cell as plain values.

    ``scores`` are the metric's of each document, in order; ``right`` counts those with the full score, with
    Wilson's interval of its share (``low``, ``high``). Costs are a block's, over all documents.
    """
    answers = [output.outputs[0].text for output in outputs]
    scores = [metrics.score(answer, case) for answer, case in zip(answers, made)]
    right = sum(score >= _WHOLE for score in scores)
    low, high = wilson(right, len(scores))
    cell: dict[str, Any] = {
        "metric": made[0].metric,
        "source": made[0].source,
        "score": sum(scores) / len(scores),
        "right": right,
        "of": len(scores),
        "low": low,
        "high": high,
        "recall": sum(metrics.all_references(a, c) for a, c in zip(answers, made) if c.references)
        / max(sum(bool(c.references) for c in made), 1),
        "seconds": seconds,
        "cost": cost_of(outputs),
        "scores": [round(score, 6) for score in scores],
        "answers": answers,
    }
    if made[0].metric == "pairs":
        counts = [structured.pair_counts(answer, case.facts) for answer, case in zip(answers, made)]
        cell["pairs_correct"] = sum(correct for correct, _ in counts)
        cell["pairs_written"] = sum(written for _, written in counts)
        cell["pairs_asked"] = sum(case.asked for case in made)
    return cell


def cost_of(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """What the answers took, a block: steps, CPU selection seconds, bytes moved; and the exposed share of
    decoding.

    Seconds count a selection's time on the clock, whatever runs beside it.
    """
    measured = [output.metrics for output in outputs]
    blocks = max(sum(m.blocks for m in measured), 1)
    decode = sum(m.decode_seconds for m in measured)
    return {
        "blocks": blocks,
        "steps_per_block": sum(m.steps for m in measured) / blocks,
        "forwards_per_block": sum(m.forwards for m in measured) / blocks,
        "selection_seconds_per_block": sum(m.selection_seconds for m in measured) / blocks,
        "bytes_moved_per_block": sum(m.bytes_moved for m in measured) / blocks,
        "exposed_share": sum(m.exposed_seconds for m in measured) / decode if decode else 0.0,
        "lookaheads": sum(m.lookaheads for m in measured),
        "boundary_selections": sum(m.boundary_selections for m in measured),
    }


def lookahead_steps(spans: Sequence[Span]) -> dict[str, Any]:
    """When look-aheads ran: ``lookahead_step`` of its block and ``steps_after_lookahead`` that came after it,
    on average (None without look-aheads), and ``lookaheads_by_step``, {step: how many}."""
    last: dict[tuple[str, int], int] = {}
    for span in spans:
        block = span.request_id, span.block
        last[block] = max(last.get(block, -1), span.step)
    ran = [(span.step, last[span.request_id, span.block] - span.step) for span in spans if span.lookahead]
    means = [sum(values) / len(ran) for values in zip(*ran)] or [None, None]
    by_step = Counter(step for step, _ in ran)
    return {
        "lookahead_step": means[0],
        "steps_after_lookahead": means[1],
        "lookaheads_by_step": {str(step): by_step[step] for step in sorted(by_step)},
    }


def check(settings: Settings, jobs: Sequence[Job]) -> None:
    """Refuse at once what a job would refuse after it has loaded its model.

    Raises:
        UsageError: an unknown method, operator, task or number of bits, or a file that is missing.
    """
    for job in jobs:
        method = methods.get(job.method)
        methods.operator_part(job.operator, job.index_bits)
        method.offload(job.budget, methods.Switches(job.index_bits, job.operator, job.lookahead_step))
    in_bytes = settings.level == "bytes"
    generated = (*cases.BYTE_TASKS, *ruler.TASKS) if in_bytes else cases.TOKEN_TASKS
    published = [
        kind for kind in ("ruler", "longbench") if kind in settings.tasks and settings.data is not None
    ]
    for task in task_names(settings):
        if task.endswith(".jsonl"):
            if not Path(task).is_file():
                raise UsageError(f"{task} is not there", "name a JSONL file")
        elif task not in generated and not published:
            known = ", ".join(dict.fromkeys(generated))
            raise InvalidOption(
                f"task={task!r} is not generated in {settings.level}", f"use {known}, or a .jsonl file"
            )


def threads_for(jobs: int, threads: int, cores: int) -> int:
    """CPU threads of each of ``jobs`` processes: what was asked, else its share of the cores."""
    return threads or max(1, cores // max(jobs, 1))


def limit_torch(threads: int) -> None:
    """Keep torch's CPU work to a process's share."""
    torch.set_num_threads(threads)

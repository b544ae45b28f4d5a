"""Cells: one method at one budget and length on one task, run on the real engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench_longctx.quality import cases, files, longbench, methods, metrics
from bench_longctx.quality.cases import Case
from bench_longctx.quality.statistics import wilson
from bench_longctx.tasks import qa, ruler, structured
from bench_longctx.tasks.forms import BytesForm, PromptForm, TokensForm
from herald import LLM, EngineConfig, RequestOutput, SamplingParams
from herald.engine.trace import Span
from herald.errors import UsageError
from herald.models import ModelConfig
from herald.tokenizer import Tokenizer

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
        UsageError: files of a group are missing.
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


def kind_of(task: str, settings: Settings) -> str:
    """Where a task's documents come from: "own", "ruler" or "longbench" files, or "generated"."""
    if task.endswith(".jsonl"):
        return "own"
    if settings.data is None or task in settings.tasks:
        return "generated"
    groups = [group for group in ("longbench", "ruler") if group in settings.tasks]
    if groups == ["longbench", "ruler"]:
        return "longbench" if task in longbench.DATASETS else "ruler"
    return groups[0] if groups else "generated"


def sources_of(task: str, settings: Settings) -> list[Path]:
    """The user's files that a task's documents are made of."""
    kind = kind_of(task, settings)
    if kind == "own":
        return [Path(task)]
    if settings.data is None:
        return []
    folder = Path(settings.data)
    if kind != "generated":
        return files.files_of(kind, task, folder)
    there = [folder / name for name in qa.FILES.get(task, ()) if (folder / name).is_file()]
    return there[:1]


def digest_of(task: str, settings: Settings) -> str:
    """Of the content of `sources_of` a task, 16 hex digits; empty where there are none.

    Raises:
        UsageError: a file cannot be read.
    """
    sources = sources_of(task, settings)
    return files.digest(sources) if sources else ""


def cases_of(task: str, length: int, settings: Settings, form: PromptForm, limit: int) -> list[Case]:
    """The cases of a task, the same for every method.

    Args:
        limit: positions that the model has.
    """
    count, folder = settings.count, None if settings.data is None else Path(settings.data)
    kind = kind_of(task, settings)
    if kind == "own":
        return files.own_cases(Path(task), count, form, length)
    if kind == "longbench" and folder is not None:
        return files.longbench_cases(task, folder, count, form, min(length, limit - 512))
    if kind == "ruler" and folder is not None:
        return files.ruler_cases(task, folder, count, form, length)
    return cases.generate(task, length, count, settings.seed, form, limit, settings.max_tokens, folder)


def form_of(settings: Settings, tokenizer: Tokenizer) -> PromptForm:
    """In what prompts are measured, and how they are put together."""
    return BytesForm() if settings.level == "bytes" else TokensForm(tokenizer, settings.chat)


def limit_of(config: ModelConfig) -> int:
    """Positions of a prompt with its answer, in whole blocks."""
    return config.max_positions // max(config.block_length, 1) * max(config.block_length, 1)


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
        form, limit = form_of(settings, llm.tokenizer), limit_of(llm.model.config)
        for task in tasks:
            digest = digest_of(task, settings)
            made = cases_of(task, job.length, settings, form, limit)
            llm.engine.trace.clear()
            began = time.perf_counter()
            outputs = generate(llm, made, settings)
            cell = cell_of(made, outputs, time.perf_counter() - began)
            cell["cost"] |= lookahead_steps(llm.engine.trace.spans())
            said(f"{job.key(task)}: {cell['score']:.1%} in {cell['seconds']:.0f} s")
            content = {"digest": digest} if digest else {}
            yield job.key(task), {**asdict(job), "task": task, **content, **cell}


def generate(llm: LLM, made: Sequence[Case], settings: Settings) -> list[RequestOutput]:
    """Answers of all cases, in one batch."""
    params = [params_of(settings, case.max_tokens) for case in made]
    ids = [ids_of(case, llm.tokenizer) for case in made]
    return llm.generate(prompt_token_ids=ids, sampling_params=params)


def params_of(settings: Settings, max_tokens: int) -> SamplingParams:
    """How an answer of ``max_tokens`` is decoded.

    Raises:
        InvalidOption: a setting is out of range.
    """
    fixed = settings.denoising_steps > 0
    return SamplingParams(
        max_tokens=max_tokens,
        confidence_threshold=None if fixed else settings.threshold,
        denoising_steps=settings.denoising_steps,
    )


def ids_of(case: Case, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt."""
    return list(case.ids) if case.ids is not None else tokenizer.encode(case.prompt)


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


def threads_for(jobs: int, threads: int, cores: int) -> int:
    """CPU threads of each of ``jobs`` processes: what was asked, else its share of the cores."""
    return threads or max(1, cores // max(jobs, 1))


def limit_torch(threads: int) -> None:
    """Keep torch's CPU work to a process's share."""
    torch.set_num_threads(threads)

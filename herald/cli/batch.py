"""``herald generate --input``: many prompts from a folder or a JSON Lines file, answers as JSON Lines.

Answers are appended as they come, in the order in which they finish. Started again with the same files, the
command skips the prompts that were answered already.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from herald.cli.fields import check_steps, engine_config, offload_config, overrides, sampling_params
from herald.cli.prompts import read_prompt
from herald.cli.report import json_object, print_statistics
from herald.errors import HeraldError, InvalidOption, UsageError
from herald.outputs import RequestMetrics, RequestOutput
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald import AsyncLLM
    from herald.engine.async_engine import Prompt

# Files of a folder that are prompts.
SUFFIXES = (".txt", ".md", ".text")
# Of a line besides its prompt, passed on to `SamplingParams`.
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "kv_budget")
PROMPTS = ("prompt", "messages", "prompt_token_ids")
# Of a line of answers.
BEGIN = b'{"id": "'
# Requests that wait beside those that run, so that a place never stays empty.
AHEAD = 2


@dataclass(frozen=True)
class Item:
    """One prompt of a batch.

    Attributes:
        name: its id in the output.
        prompt: text, token ids, or messages of a conversation.
    """

    name: str
    prompt: Any
    params: SamplingParams


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads besides the options of every prompt."""
    group = parser.add_argument_group(
        "batches",
        "Answers to many prompts, as many at a time as run together. Started again, it goes on where it was.",
    )
    group.add_argument(
        "--input",
        metavar="PATH",
        help="a folder of text files, or JSON Lines: a prompt, messages or prompt_token_ids a line, with an "
        "id and its own max_tokens, temperature, top_p, top_k, seed, stop, ignore_eos or kv_budget",
    )
    group.add_argument("--output", metavar="FILE", help="answers as JSON Lines; those in it are not repeated")


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet; returns 1 where a prompt failed."""
    params, offload, engine = sampling_params(args), offload_config(args), engine_config(args)
    source, target = Path(args.input), Path(args.output)
    done = answered(target)
    items = [item for item in read_items(source, params) if item.name not in done]
    if done and not args.quiet:
        print(f"{len(done)} prompts are answered already, {len(items)} are left", file=sys.stderr)
    if not items:
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        from herald import AsyncLLM

        llm = AsyncLLM(args.model, args.device, args.dtype, offload, engine, **overrides(args))
        with target.open("a", encoding="utf-8") as out:
            metrics, failed = asyncio.run(_answer(llm, items, args, out))
    if not args.quiet and metrics:
        print_statistics(metrics)
    if failed:
        print(f"herald: error: {failed} of {len(items)} prompts failed; see {target}", file=sys.stderr)
    return 1 if failed else 0


def read_items(source: Path, params: SamplingParams) -> Iterator[Item]:
    """Prompts of a folder (one a file, named by its path below it) or of a JSON Lines file.

    Args:
        params: where a line has no options of its own.

    Raises:
        UsageError: nothing is there, or a line is no prompt.
    """
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.is_file() and path.suffix in SUFFIXES)
        if not files:
            raise UsageError(f"--input {source} has no prompts", f"put files in it: *{', *'.join(SUFFIXES)}")
        for path in files:
            yield Item(path.relative_to(source).as_posix(), read_prompt(str(path), "--input"), params)
        return
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--input {source} cannot be read ({error})", "name a folder, or a JSON Lines file in UTF-8"
        ) from error
    names: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            item = _item(line, number, params)
            if item.name in names:
                raise UsageError(f"--input line {number}: id {item.name!r} occurs twice", "give each its own")
            names.add(item.name)
            yield item
    if not names:
        raise UsageError(f"--input {source} has no lines", 'write one a prompt: {"id": "a", "prompt": "..."}')


def _item(line: str, number: int, params: SamplingParams) -> Item:
    """The prompt of a line; its number is its id where it has none."""

    def wrong(problem: str, remedy: str) -> UsageError:
        return UsageError(f"--input line {number}: {problem}", remedy)

    try:
        entry = json.loads(line)
    except ValueError as error:
        raise wrong(f"no JSON ({error})", 'write {"id": "a", "prompt": "..."}') from error
    if not isinstance(entry, dict):
        raise wrong("no object", 'write {"id": "a", "prompt": "..."}')
    kinds = [name for name in PROMPTS if name in entry]
    if len(kinds) != 1:
        raise wrong("one prompt is needed", f"give one of {', '.join(PROMPTS)}")
    unknown = next((name for name in entry if name not in (*PROMPTS, *FIELDS, "id")), None)
    if unknown is not None:
        raise wrong(f"{unknown!r} is not known", f"use id, {', '.join((*PROMPTS, *FIELDS))}")
    prompt, kind = entry[kinds[0]], str if kinds[0] == "prompt" else list
    if not isinstance(prompt, kind) or not prompt:
        raise wrong(f"{kinds[0]} is no {kind.__name__}, or empty", "give it some text")
    given = {name: entry[name] for name in FIELDS if name in entry}
    try:
        own = replace(params, **given) if given else params
    except InvalidOption as error:
        raise wrong(error.problem, error.remedy) from error
    return Item(str(entry.get("id", number)), prompt, own)


def answered(target: Path) -> set[str]:
    """Ids that a file of answers holds; a line that was cut off in writing is taken out of it.

    Raises:
        UsageError: it is something else, which is left as it is, or cannot be written.
    """
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"--output {target} cannot be written", "name a file, in a folder that is there")
    if not target.exists():
        return set()
    done, whole = set(), 0
    with target.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line[: len(BEGIN)] == BEGIN[: len(line)]:
                break
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
                entry = {}
            if entry.keys().isdisjoint(("text", "error")):
                raise UsageError(
                    f"--output {target} is no file of answers (line {number} is none)", "name another file"
                )
            whole += len(line)
            if "error" not in entry:
                done.add(entry["id"])
    if whole < target.stat().st_size:
        with target.open("r+b") as file:
            file.truncate(whole)
    return done


async def _answer(
    llm: AsyncLLM, items: list[Item], args: argparse.Namespace, out: TextIO
) -> tuple[list[RequestMetrics], int]:
    """Run all items, a few more at a time than run together. Returns metrics, and how many failed."""
    metrics: list[RequestMetrics] = []
    failed = 0
    waiting = deque(items)
    bar = _Bar(not args.quiet and sys.stderr.isatty(), len(items))

    async def work() -> None:
        nonlocal failed
        while waiting:
            item = waiting.popleft()
            entry: dict[str, Any] = {"id": item.name}
            try:
                output = await _one(llm, item, args.chat)
                entry |= json_object(output)
                metrics.append(output.metrics)
            except HeraldError as error:
                failed += 1
                entry["error"] = str(error)
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")
            out.flush()
            bar.step()

    async with llm:
        check_steps(items[0].params, llm.llm)  # those of the command line: a line has none of its own
        count = llm.llm.engine.config.max_num_seqs + AHEAD
        try:
            await asyncio.gather(*(work() for _ in range(count)))
        finally:
            bar.close()
    return metrics, failed


async def _one(llm: AsyncLLM, item: Item, chat: bool) -> RequestOutput:
    prompt: Prompt = item.prompt
    messages = None
    if isinstance(item.prompt, list) and isinstance(item.prompt[0], dict):
        messages = item.prompt
    elif chat and isinstance(item.prompt, str):
        messages = [{"role": "user", "content": item.prompt}]
    if messages is not None:
        prompt = lambda tokenizer: tokenizer.chat(messages)  # noqa: E731
    (generation,) = await llm.async_engine.submit([prompt], [item.params])
    return await generation.last()


class _Bar:
    """A progress bar over prompts."""

    def __init__(self, enabled: bool, total: int) -> None:
        self._bar: Any = None
        if enabled:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=" prompts", file=sys.stderr)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

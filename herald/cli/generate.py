"""``herald generate``: answer prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from herald.cli import batch
from herald.cli.fields import check_steps, engine_config, offload_config, open_model, sampling_params
from herald.cli.prefix import load_document
from herald.cli.progress import ProgressBars
from herald.cli.prompts import collect_prompts
from herald.cli.report import json_object, print_statistics
from herald.errors import UsageError
from herald.outputs import RequestOutput
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald import LLM

_HEADING_CHARACTERS = 72
_REPLACEMENT = "\ufffd"


def run(args: argparse.Namespace) -> int:
    """Generate, print, and return the exit code."""
    if args.input is not None or args.output is not None:
        _check_batch(args)
        return batch.run(args)
    params, offload, engine = sampling_params(args), offload_config(args), engine_config(args)
    prompts = collect_prompts(args.prompt, args.prompt_file)
    if args.prefix is not None and args.prompt_file:
        raise UsageError("--prefix brings its document", "leave --prompt-file out")
    out = sys.stdout
    # Whatever a library prints while the model loads or runs is not the answer.
    with (
        contextlib.redirect_stdout(sys.stderr),
        open_model(args, offload, engine) as llm,
    ):
        check_steps(params, llm)
        if args.prefix is not None:
            document = load_document(llm, args.prefix, args.chat)
            prompts = [f"{document}\n{prompt}" for prompt in prompts]
        inputs = [_Input(llm, prompt, args.chat) for prompt in prompts]
        answer = _stream if args.stream else _answer
        outputs = answer(llm, inputs, params, args, out)
    if not args.quiet and not args.json:
        print_statistics([output.metrics for output in outputs])
    return 0


def _check_batch(args: argparse.Namespace) -> None:
    """Refuse what has no meaning beside ``--input``."""
    if args.input is None or args.output is None:
        raise UsageError("--input and --output go together", "give both")
    for option in ("prompt", "prompt_file", "stream", "json"):
        if getattr(args, option):
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} has no meaning beside --input", "leave it out")


class _Input:
    """A prompt as the engine takes it: text, or token ids when the chat template made them."""

    def __init__(self, llm: LLM, text: str, chat: bool) -> None:
        self.shown = text
        self.token_ids: list[int] | None = (
            list(llm.tokenizer.chat([{"role": "user", "content": text}])) if chat else None
        )

    @property
    def text(self) -> str | None:
        return self.shown if self.token_ids is None else None


def _answer(
    llm: LLM, inputs: Sequence[_Input], params: SamplingParams, args: argparse.Namespace, out: TextIO
) -> list[RequestOutput]:
    """All prompts in one batch, printed in order when they are done."""
    prompts: dict[str, Any] = (
        {"prompts": None, "prompt_token_ids": [each.token_ids for each in inputs]}
        if args.chat
        else {"prompts": [each.text for each in inputs]}
    )
    with ProgressBars(_draws_progress(args), len(inputs)) as progress:
        outputs = llm.generate(sampling_params=params, progress=progress, **prompts)
    for number, (each, output) in enumerate(zip(inputs, outputs)):
        if args.json:
            print(json.dumps(json_object(output), ensure_ascii=not _is_utf8(out)), file=out)
        else:
            _print_heading(each.shown, number, len(inputs), args)
            print(output.outputs[0].text, file=out, flush=True)
    return outputs


def _stream(
    llm: LLM, inputs: Sequence[_Input], params: SamplingParams, args: argparse.Namespace, out: TextIO
) -> list[RequestOutput]:
    """One prompt after another, each printed block by block."""
    finished = []
    for number, each in enumerate(inputs):
        _print_heading(each.shown, number, len(inputs), args)
        written = ""
        with ProgressBars(_draws_progress(args), phases=("prefill",)) as progress:
            states = llm.stream(each.text, params, prompt_token_ids=each.token_ids, progress=progress)
            for state in states:
                progress.close()
                text = state.outputs[0].text
                # A block may end inside a character, whose bytes decode only with those of the next block.
                ready = text if state.finished else text.rstrip(_REPLACEMENT)
                if ready.startswith(written):
                    out.write(ready[len(written) :])
                    written = ready
                    out.flush()
                if state.finished:
                    finished.append(state)
        print(file=out, flush=True)
    return finished


def _draws_progress(args: argparse.Namespace) -> bool:
    return not args.quiet and sys.stderr.isatty()


def _is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def _print_heading(prompt: str, number: int, count: int, args: argparse.Namespace) -> None:
    """Name the prompt that the next answer belongs to, on standard error, when there are several."""
    if count == 1 or args.quiet:
        return
    lines = [line.strip() for line in prompt[-4 * _HEADING_CHARACTERS :].splitlines()]
    end = " ".join([line for line in lines if line][-2:])  # a question and the start of its answer
    shown = end if len(end) <= _HEADING_CHARACTERS else "..." + end[-_HEADING_CHARACTERS:]
    print(f"[{number + 1}/{count}] {shown}", file=sys.stderr, flush=True)

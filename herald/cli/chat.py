"""``herald chat``: a conversation in the terminal, answered block by block."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from herald.cli.fields import check_steps, engine_config, offload_config, open_model, sampling_params
from herald.cli.options import add_model_options, add_offload_options, add_sampling_options
from herald.cli.prompts import read_prompt
from herald.cli.report import print_statistics
from herald.errors import HeraldError, UsageError
from herald.outputs import RequestOutput
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald import LLM

HELP = (
    "/file PATH  add a document to the next question\n"
    "/stats      counts and times of the last answer\n"
    "/reset      forget the conversation and its documents\n"
    "/quit       leave (or Ctrl-D); Ctrl-C ends an answer"
)
_REPLACEMENT = "\ufffd"


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option of ``herald chat``."""
    add_model_options(parser)
    add_sampling_options(parser)
    add_offload_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves; returns the exit code."""
    params, offload, engine = sampling_params(args), offload_config(args), engine_config(args)
    out = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    with contextlib.redirect_stdout(sys.stderr):
        llm = open_model(args, offload, engine)
    with llm:
        check_steps(params, llm)
        if not llm.tokenizer.has_chat_template:
            raise UsageError(
                f"{args.model} has no chat template", "use a chat model, or herald generate for plain prompts"
            )
        Conversation(llm, params, out, args.system).talk()
    return 0


class Conversation:
    """Turns of a conversation, and the commands between them.

    Args:
        out: where answers and questions appear.
        system: what the model is told first.
    """

    def __init__(self, llm: LLM, params: SamplingParams, out: Console, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.out = out
        self._first = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []
        self._documents: list[str] = []
        self._last: RequestOutput | None = None

    def talk(self) -> None:
        """Read lines until ``/quit`` or the input's end."""
        self.out.print("Ask something, or /help.", style="dim")
        while True:
            try:
                line = self.out.input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self.out.print()
                return
            if line == "/quit":
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        """A command or a question; what goes wrong is said, and the conversation goes on."""
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._ask(line)
        except HeraldError as error:
            self.out.print(f"error: {error}", style="red")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/file" and rest.strip():
            path = " ".join(shlex.split(rest)) if rest.strip()[0] in "\"'" else rest.strip()
            if path == "-":
                raise UsageError("/file - would read the conversation", "name a file")
            text = read_prompt(path, "/file")
            self._documents.append(text)
            self.out.print(f"{path}: {len(self.llm.tokenizer.encode(text)):,} tokens", style="dim")
        elif name == "/stats" and self._last is not None:
            print_statistics([self._last.metrics])
        elif name == "/stats":
            self.out.print("nothing was answered yet", style="dim")
        elif name == "/reset":
            self._turns, self._documents, self._last = [], [], None
            self.out.print("forgotten", style="dim")
        elif name == "/help":
            self.out.print(HELP, style="dim")
        else:
            raise UsageError(f"{name} is no command, or lacks its path", "try /help")

    def _ask(self, question: str) -> None:
        """Answer a question; a turn that fails or is broken off at once leaves nothing behind."""
        turn = {"role": "user", "content": "\n".join([*self._documents, question])}
        messages: list[Any] = [*self._first, *self._turns, turn]
        ids = self.llm.tokenizer.chat(messages)
        written = ""
        states = self.llm.stream(prompt_token_ids=ids, sampling_params=self.params)
        try:
            for state in states:
                self._last = state
                text = state.outputs[0].text
                # A block may end inside a character, whose bytes decode only with those of the next block.
                ready = text if state.finished else text.rstrip(_REPLACEMENT)
                if ready.startswith(written):
                    self.out.print(ready[len(written) :], end="")
                    written = ready
        except KeyboardInterrupt:
            self.out.print(" (ended)", style="dim", end="")
        finally:
            states.close()  # type: ignore[attr-defined]
            self.out.print()
        self._documents = []
        self._turns += [turn, {"role": "assistant", "content": written}]

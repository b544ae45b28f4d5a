"""Entry point of the command ``herald``: the parser, exit codes, and errors on one line.

Exit codes: 0 done, 1 failed at run time, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from herald import __version__
from herald.cli import batch, chat, doctor, fields, generate, models, options, prefix, profile, serve
from herald.cli.stdout import drop_output
from herald.errors import HeraldError, UsageError

RUNTIME_ERROR, USAGE_ERROR, INTERRUPTED = 1, 2, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"herald: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; ``args.run`` is the chosen command."""
    parser = _Parser(
        prog="herald",
        description="Long prompts on block-diffusion language models, with the KV cache in host memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"herald {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "generate", help="answer prompts", description="Answer prompts.", allow_abbrev=False
    )
    options.add_generate_options(command)
    batch.add_batch_options(command)
    command.set_defaults(run=generate.run)
    prefix.add_commands(commands)
    command = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model in the terminal; /help lists what it understands.",
        allow_abbrev=False,
    )
    chat.add_chat_options(command)
    command.set_defaults(run=chat.run)
    command = commands.add_parser(
        "serve",
        help="answer requests over HTTP, as OpenAI's interface has them",
        description="Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, "
        "/detokenize, /health, /ready, /metrics. See docs/serving.md.",
        allow_abbrev=False,
    )
    serve.add_serve_options(command)
    command.set_defaults(run=serve.run)
    command = commands.add_parser(
        "doctor",
        help="show what this machine offers and what would make it faster",
        description="Show what this machine offers, which kernels are active, and which context lengths fit.",
        allow_abbrev=False,
    )
    doctor.add_doctor_options(command)
    command.set_defaults(run=doctor.run)
    command = commands.add_parser(
        "models",
        help="list the model families, their checkpoints and what of them is verified",
        description="List the model families, their released checkpoints, and what of them is verified.",
        allow_abbrev=False,
    )
    models.add_models_options(command)
    command.set_defaults(run=models.run)
    command = commands.add_parser(
        "profile",
        help="show where the time of a run goes: trace, timeline, summary",
        description="Run a workload; write trace.json.gz (for ui.perfetto.dev), timeline.png, summary.json.",
        allow_abbrev=False,
    )
    profile.add_profile_options(command)
    command.set_defaults(run=profile.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `SystemExit` comes from ``--help`` and wrong options."""
    _open_what_is_closed()
    _print_what_can_be_printed()
    args = argparse.Namespace()
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output()  # the reader left
        return RUNTIME_ERROR
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except HeraldError as error:
        usage = isinstance(error, UsageError)
        problem = fields.problem_in_options(error.problem, args) if usage else error.problem
        told = HeraldError(problem, fields.in_options(error.remedy, args))
        return _fail(str(told), USAGE_ERROR if usage else RUNTIME_ERROR)
    except OSError as error:
        drop_output()
        remedy = "; free space where it is written to, or write elsewhere" if error.errno in _FULL else ""
        return _fail(f"{error}{remedy}", RUNTIME_ERROR)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail(
            f"out of memory: {error}; lower --max-model-len, --max-num-seqs or --kv-budget", RUNTIME_ERROR
        )


def _open_what_is_closed() -> None:
    """Let standard streams that the caller closed read nothing and swallow what is written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # for as long as the process lives
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _print_what_can_be_printed() -> None:
    """Let a terminal without Unicode show ``?`` where it cannot show a character."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _is_out_of_memory(error: BaseException) -> bool:
    # By name: torch, which defines the GPU's error, may not have been imported at all.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _fail(message: str, code: int) -> int:
    print(f"herald: error: {' '.join(message.split())}", file=sys.stderr)
    return code

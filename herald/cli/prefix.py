"""``herald prefix``: a document's KV on disk."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from herald.cli.fields import engine_config, offload_config, open_model
from herald.cli.options import add_model_options, add_offload_options
from herald.cli.prompts import collect_prompts
from herald.doctor.units import format_bytes, format_seconds
from herald.errors import UsageError

if TYPE_CHECKING:
    from herald import LLM


def add_commands(commands: Any) -> None:
    """Declare ``herald prefix save`` and ``herald prefix load``."""
    parser = commands.add_parser(
        "prefix",
        help="keep a document's KV cache on disk, to ask about it later",
        description="Keep a document's KV cache on disk; `herald generate --prefix DIR` asks about it.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser(
        "save",
        help="prefill a document and write it to a folder",
        description="Prefill a document and write its KV cache and key index to a new folder.",
        allow_abbrev=False,
    )
    action.add_argument("folder", metavar="DIR", help="that does not exist yet, or is empty")
    action.add_argument(
        "--prompt-file",
        action="append",
        required=True,
        metavar="FILE",
        help="UTF-8 text, - for stdin; may be repeated: the files are joined by a newline",
    )
    action.add_argument("--chat", action="store_true", help="for questions that are asked with --chat")
    _add_common_options(action)
    action.set_defaults(run=save)
    action = actions.add_parser(
        "load",
        help="check that a saved document fits this model and machine",
        description="Read a saved document into the host pool, as `herald generate --prefix` does.",
        allow_abbrev=False,
    )
    action.add_argument("folder", metavar="DIR", help="of herald prefix save")
    _add_common_options(action)
    action.set_defaults(run=load)


def save(args: argparse.Namespace) -> int:
    """Save, print what it took, and return the exit code."""
    offload, engine = offload_config(args), engine_config(args)
    document = "\n".join(collect_prompts([], args.prompt_file))
    with contextlib.redirect_stdout(sys.stderr), open_model(args, offload, engine) as llm:
        begin = time.perf_counter()
        num_bytes = llm.save_prefix(document, args.folder, chat=args.chat)
        seconds = time.perf_counter() - begin
    print(f"saved {format_bytes(num_bytes)} to {args.folder} in {format_seconds(seconds)}")
    return 0


def load(args: argparse.Namespace) -> int:
    """Load, print what it took, and return the exit code."""
    offload, engine = offload_config(args), engine_config(args)
    with contextlib.redirect_stdout(sys.stderr), open_model(args, offload, engine) as llm:
        begin = time.perf_counter()
        tokens = llm.load_prefix(args.folder).num_tokens
        seconds = time.perf_counter() - begin
    print(f"{args.folder} fits: {tokens:,} tokens loaded in {format_seconds(seconds)}")
    return 0


def load_document(llm: LLM, folder: str, chat: bool) -> str:
    """Load a saved document into ``llm`` and return its text.

    Raises:
        UsageError: it was saved for prompts of another kind. Others as `LLM.load_prefix`.
    """
    prefix = llm.load_prefix(folder)
    if prefix.text is None:
        raise UsageError(
            f"{folder} was saved from token ids, without a text", "ask about it with herald.LLM.load_prefix"
        )
    if prefix.chat != chat:
        raise UsageError(
            f"{folder} was saved {'with' if prefix.chat else 'without'} --chat",
            f"{'add' if prefix.chat else 'leave out'} --chat, or save it again",
        )
    return prefix.text


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_offload_options(parser)

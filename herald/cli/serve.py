"""``herald serve``: OpenAI's interface over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from herald.cli.fields import build, engine_config, offload_config, overrides
from herald.cli.options import add_model_options, add_offload_options, number, seed, size, whole
from herald.config import EngineConfig, OffloadConfig
from herald.errors import UsageError
from herald.serve.config import ServeConfig

if TYPE_CHECKING:
    from herald import AsyncLLM

KEY_VARIABLE = "HERALD_API_KEY"
LEVELS = ("debug", "info", "warning", "error")

# Option on the command line -> field of `ServeConfig`.
_FIELDS = {
    "host": "host",
    "port": "port",
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "max_waiting": "max_waiting",
    "max_body": "max_body_bytes",
    "max_choices": "max_choices",
    "default_max_tokens": "max_tokens",
    "max_kv_budget": "max_kv_budget",
    "max_block_length": "max_block_length",
    "max_denoising_steps": "max_denoising_steps",
    "keep_alive": "keep_alive_seconds",
    "drain_seconds": "drain_seconds",
    "watchdog_seconds": "watchdog_seconds",
    "access_log": "access_log",
}


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option of ``herald serve``."""
    add_model_options(parser)
    add_offload_options(parser)
    group = parser.add_argument_group("server")
    default = ServeConfig

    def add(*names: str, **options: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **options)

    add(
        "--tokens-per-step",
        type=whole,
        metavar="N",
        help="prompt tokens between two decode steps, with the blocks that decode; fewer hold running "
        "answers up less (default: 512 beside the blocks)",
    )
    add(
        "--prefill-chunk",
        type=whole,
        metavar="N",
        help=f"positions of a prefill unit (default: {EngineConfig.prefill_chunk})",
    )
    add("--host", metavar="HOST", help=f"where to listen (default: {default.host})")
    add("--port", type=whole, metavar="N", help=f"0 for a free one (default: {default.port})")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="a name that clients may ask for; may be repeated (default: what --model says)",
    )
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"a bearer token that clients must send; may be repeated; {KEY_VARIABLE} adds one",
    )
    add(
        "--max-waiting",
        type=whole,
        metavar="N",
        help=f"requests that may wait beside those that run (default: {default.max_waiting})",
    )
    add(
        "--max-body",
        type=size,
        metavar="SIZE",
        help=f"largest request (default: {default.max_body_bytes // 2**20}MiB)",
    )
    add(
        "--max-choices",
        type=whole,
        metavar="N",
        help=f"completions of one call, n times its prompts (default: {default.max_choices})",
    )
    add(
        "--default-max-tokens",
        type=whole,
        metavar="N",
        help=f"new tokens of a chat completion that names no number (default: {default.max_tokens})",
    )
    add(
        "--max-kv-budget",
        type=number,
        metavar="SHARE",
        help="largest kv_budget a request may ask for (default: --kv-budget)",
    )
    add(
        "--max-block-length",
        type=whole,
        metavar="N",
        help="block lengths a request may ask for are divisors of it: each has memory of its own on the "
        "device (default: the checkpoint's)",
    )
    add(
        "--max-denoising-steps",
        type=whole,
        metavar="N",
        help=f"largest denoising_steps and max_post_steps (default: {default.max_denoising_steps})",
    )
    add(
        "--keep-alive",
        type=number,
        metavar="SECONDS",
        help=f"between two comments on a silent stream (default: {default.keep_alive_seconds:g})",
    )
    add(
        "--drain-seconds",
        type=number,
        metavar="SECONDS",
        help=f"how long requests may go on after SIGTERM (default: {default.drain_seconds:g})",
    )
    add(
        "--watchdog-seconds",
        type=number,
        metavar="SECONDS",
        help="report a step that takes longer, and fail /health; 0 for never "
        f"(default: {default.watchdog_seconds:g})",
    )
    add(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        help="log a line for each request, never its text (default: yes)",
    )
    group.add_argument(
        "--reserve-tokens",
        type=whole,
        metavar="N",
        help="prompt and output tokens, over all requests, for which memory is allocated at the start; 0 "
        "lets it follow the requests (default: what --max-num-seqs requests use, in half of what is free)",
    )
    group.add_argument("--seed", type=seed, metavar="N", help="for requests without one (default: random)")
    group.add_argument("--log-level", choices=LEVELS, default="info", help="default: info")


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """`ServeConfig` of the options given; raises `InvalidOption` by the option's name."""
    keys = (*getattr(args, "api_key", ()), *filter(None, [os.environ.get(KEY_VARIABLE)]))
    names = tuple(getattr(args, "served_model_name", ()))
    return build(ServeConfig, args, _FIELDS, api_keys=keys, served_model_names=names)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    config, offload, engine = serve_config(args), offload_config(args), engine_config(args)
    try:
        from herald.serve.server import HeraldServer
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the server needs {error.name}, which is not installed", "run: pip install 'herald-dllm[serve]'"
        ) from error
    logging.basicConfig(
        stream=sys.stderr,
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    HeraldServer(config, lambda: _load(args, config, offload, engine), args.model).run_until_end()
    return 0


def _load(
    args: argparse.Namespace, config: ServeConfig, offload: OffloadConfig, engine: EngineConfig
) -> AsyncLLM:
    from herald import AsyncLLM

    return AsyncLLM(
        args.model,
        args.device,
        args.dtype,
        offload,
        engine,
        seed=args.seed,
        **overrides(args),
        max_waiting=config.max_waiting,
        reserve_tokens=args.reserve_tokens,
    )

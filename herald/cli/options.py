"""Types of options, and the options that commands share; what they mean stands in `fields`."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

from herald.config import EngineConfig, OffloadConfig
from herald.sampling_params import SamplingParams

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]i?)?b)?", re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|cuda(?::\d+)?")


def size(text: str) -> int:
    """Bytes of ``16GiB`` (powers of 1024), ``16GB`` (powers of 1000) or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    num_bytes = float(match[1]) * _UNITS[(match[2] or "").lower()] if match is not None else math.inf
    if num_bytes >= 2**63:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a size; write it as 16GiB, 16GB or a number of bytes"
        )
    return int(num_bytes)


def whole(text: str) -> int:
    """A whole number of at most 18 digits."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) is None:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number of at most 18 digits")
    return int(text)


def number(text: str) -> float:
    """A number as Python writes it."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a number, such as 0.08") from None


def threshold(text: str) -> float | str | None:
    """A probability, ``off`` for a fixed number of tokens a step, or ``auto``."""
    if text in ("off", "auto"):
        return None if text == "off" else text
    with contextlib.suppress(ValueError):
        if 0.0 <= float(text) <= 1.0:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"{_shown(text)} is not a probability; write one such as 0.9, auto or off"
    )


def seed(text: str) -> int:
    """A seed that every generator takes."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a seed; use 0 to {2**63 - 1}")
    return int(text)


def device(text: str) -> str:
    if _DEVICE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a device; use auto, cpu, cuda or cuda:N")
    return text


def _shown(text: str) -> str:
    """``text`` quoted for a message of one line, its middle left out when it is long."""
    return reprlib.repr(text)


def _adder(group: Any) -> Callable[..., None]:
    """``add`` with no default: what the user leaves out is absent, and the dataclass's own default holds."""

    def add(*names: str, **kwargs: Any) -> None:
        group.add_argument(*names, **{"default": argparse.SUPPRESS, **kwargs})

    return add


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option of ``herald generate``."""
    _add_prompt_options(parser)
    add_model_options(parser)
    add_sampling_options(parser)
    add_offload_options(parser)
    _add_output_options(parser)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "prompts",
        "Each --prompt is a prompt of its own. Files alone: each file is a prompt. Files and prompts: the "
        "files, joined by a newline, are a document that stands before each prompt, with a newline between. "
        "A file's last newline is dropped.",
    )
    group.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated"
    )
    group.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 text, - for stdin; may be repeated",
    )
    group.add_argument(
        "--prefix",
        metavar="DIR",
        help="a document of `herald prefix save`, which stands before each --prompt without being prefilled",
    )
    group.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `LLM` and `engine_config` take."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="tiny",
        help="a local folder, a hub id, or tiny, the bundled model (default: %(default)s)",
    )
    group.add_argument(
        "--device", type=device, default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: auto"
    )
    add_override_options(group)
    add = _adder(group)
    add(
        "--max-model-len",
        type=whole,
        metavar="N",
        help="positions of prompt and output (default: the model's limit)",
    )
    add(
        "--max-num-seqs",
        type=whole,
        metavar="N",
        help=f"prompts decoded together (default: {EngineConfig.max_num_seqs})",
    )
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="replay recorded steps on a GPU (default: yes)",
    )


def add_override_options(group: Any) -> None:
    """Declare what `overrides` reads."""
    group.add_argument(
        "--block-length",
        type=whole,
        default=0,
        metavar="N",
        help="positions denoised together (default: checkpoint's)",
    )
    group.add_argument("--mask-token-id", type=whole, metavar="ID", help="mask token (default: checkpoint's)")
    group.add_argument(
        "--rope-scaling",
        default="",
        metavar="KIND:FACTOR",
        help="yarn:4 or linear:2, for more positions than the model was made for (default: checkpoint's)",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `sampling_params` takes."""
    add = _adder(parser.add_argument_group("decoding"))
    default = SamplingParams
    add("--max-tokens", type=whole, metavar="N", help=f"new tokens at most (default: {default.max_tokens})")
    add("--temperature", type=number, metavar="T", help="0 is greedy (default: 0)")
    add("--top-p", type=number, metavar="P", help="nucleus share in (0, 1] (default: 1)")
    add("--top-k", type=whole, metavar="K", help="candidates kept, 0 for all (default: 0)")
    add("--seed", type=seed, metavar="N", help="seed of each prompt's own generator")
    add("--stop", action="append", metavar="TEXT", help="end the output before this text; may be repeated")
    add(
        "--threshold",
        type=threshold,
        metavar="P",
        help="commit every position above this confidence in a step, or off for a fixed number a step "
        f"(default: {default.confidence_threshold}, the family's: 0.9, off with full attention)",
    )
    add(
        "--confidence-factor",
        type=number,
        metavar="F",
        help="LLaDA: commit as many positions as this factor lets through (Fast-dLLM), without threshold",
    )
    add(
        "--algorithm",
        choices=("auto", "maskgit_plus", "entropy", "topk_margin"),
        help="Dream: what ranks positions (default: auto, which is entropy)",
    )
    add_cache_option(add)
    add("--steps", type=whole, metavar="N", help="denoising steps a block may take (default: one a position)")
    add(
        "--sub-block-length",
        type=whole,
        metavar="N",
        help="commit within the first N positions that still have a mask (Fast-dLLM v2; default: 8 there)",
    )
    add(
        "--editing-threshold",
        type=number,
        metavar="P",
        help="replace committed tokens of a block where others are likelier than this (LLaDA2.1)",
    )
    add(
        "--max-post-steps",
        type=whole,
        metavar="N",
        help=f"with it, steps of a block that has no mask left (default: {default.max_post_steps})",
    )
    add(
        "--entropy-bound",
        type=number,
        metavar="NATS",
        help="of a canvas: accept tokens while the entropies of those before add up to no more "
        "(DiffusionGemma; default: checkpoint's)",
    )
    add(
        "--stop-entropy",
        type=number,
        metavar="NATS",
        help="of a canvas: finished when it is unchanged and its mean entropy below this, 0 for never "
        "(default: checkpoint's)",
    )
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def add_cache_option(add: Callable[..., Any]) -> None:
    """Declare ``--cache``; ``add`` is a parser's ``add_argument``."""
    add(
        "--cache",
        choices=("auto", "none", "prefix", "dual"),
        default=argparse.SUPPRESS,
        help="LLaDA, Dream: none computes every position in every step, prefix keeps what stands before the "
        "block, dual all but the block (approximate; default: auto, which is none)",
    )


def add_offload_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `offload_config` takes."""
    add = _adder(parser.add_argument_group("offload"))
    default = OffloadConfig
    add(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="keep the KV cache in host memory (default: yes)",
    )
    add(
        "--kv-budget",
        type=number,
        metavar="SHARE",
        help=f"rows attended to / rows (default: {default.kv_budget})",
    )
    add(
        "--index-bits",
        type=whole,
        choices=(16, 8, 4, 1),
        help=f"key index (default: {default.index_bits}; 16 is exact)",
    )
    add(
        "--refresh-commits",
        type=number,
        metavar="SHARE",
        help="with a threshold, a step that follows one which committed this share of the block's positions "
        "first selects with its own queries, and so does a block whose look-ahead saw half as much of the "
        f"block before wrongly; 0 for never (default: {default.refresh_commits})",
    )
    add(
        "--lookahead",
        choices=("fixed", "late"),
        help="look ahead in a fixed step of a block, or as late as measured times say that rows still "
        f"arrive, which may choose other rows in another run (default: {default.lookahead})",
    )
    add(
        "--lookahead-step",
        type=whole,
        metavar="N",
        help="step of a block that looks ahead to the next, the first that may with --lookahead late "
        f"(default: {default.lookahead_step})",
    )
    add(
        "--on-late",
        choices=("wait", "proceed"),
        help=f"when a selection is late (default: {default.on_late})",
    )
    add(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="host pool, such as 16GiB (default: for the longest request)",
    )
    add(
        "--prefix-sharing",
        action=argparse.BooleanOptionalAction,
        help="let prompts that begin alike share pages, so that a later one skips their prefill "
        "(default: yes)",
    )
    add("--transfer", choices=("auto", "zero_copy", "staged"), help="how rows reach a GPU (default: auto)")
    add(
        "--num-threads",
        type=whole,
        metavar="N",
        help="CPU threads of selection (default: all usable cores, less two beside a GPU)",
    )
    add(
        "--scan-on-device",
        action=argparse.BooleanOptionalAction,
        help="let a GPU score a share of the key index; the rows chosen are the same (default: yes)",
    )
    add(
        "--index-device-memory",
        type=size,
        metavar="SIZE",
        help="GPU memory for layers of the key index, such as 8GiB, which are then scored there without "
        "crossing the bus; without a GPU nothing is taken (default: none)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--stream", action="store_true", help="print the answer block by block")
    shape.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout")
    group.add_argument("--quiet", action="store_true", help="no progress bar and no statistics")

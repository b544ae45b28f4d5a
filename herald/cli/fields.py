"""What options of the command line mean: the fields they set, and errors that speak of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from herald.config import EngineConfig, OffloadConfig, check
from herald.errors import InvalidOption
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald import LLM

# Option name on the command line -> field of the dataclass.
_SAMPLING = {
    "max_tokens": "max_tokens",
    "new_tokens": "max_tokens",  # as `herald profile` calls it
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop": "stop",
    "threshold": "confidence_threshold",
    "confidence_factor": "confidence_factor",
    "algorithm": "algorithm",
    "cache": "cache",
    "steps": "denoising_steps",
    "sub_block_length": "sub_block_length",
    "editing_threshold": "editing_threshold",
    "max_post_steps": "max_post_steps",
    "entropy_bound": "entropy_bound",
    "stop_entropy": "stop_entropy",
    "ignore_eos": "ignore_eos",
}
_OFFLOAD = {
    "offload": "enabled",
    "kv_budget": "kv_budget",
    "index_bits": "index_bits",
    "refresh_commits": "refresh_commits",
    "lookahead": "lookahead",
    "lookahead_step": "lookahead_step",
    "on_late": "on_late",
    "host_memory": "host_memory_bytes",
    "prefix_sharing": "prefix_sharing",
    "transfer": "transfer",
    "num_threads": "num_threads",
    "scan_on_device": "scan_on_device",
    "index_device_memory": "index_device_bytes",
}
_ENGINE = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "tokens_per_step": "tokens_per_step",
    "prefill_chunk": "prefill_chunk",
    "cuda_graphs": "cuda_graphs",
}


# Fields of the model's own options, which have their names.
_MODEL = {name: name for name in ("block_length", "mask_token_id", "rope_scaling")}
# Where a model is loaded to, and how; these options have the names of their arguments too.
_LOADING = {name: name for name in ("device", "dtype")}
_QUOTES = "'\""
_Options = TypeVar("_Options")


def in_options(remedy: str, args: argparse.Namespace) -> str:
    """A remedy with the options of Python as those of the command line.

    ``max_model_len=9`` becomes ``--max-model-len=9``, a bare ``max_model_len`` ``--max-model-len``, None what
    an option that is left out stands for, and a size of the host pool the option that sets it.
    """
    spoken = re.sub(r"\buse None\b", "leave it out", remedy)
    spoken = re.sub(r"\bor None\b", "or leave it out", spoken)
    spoken = re.sub(r"(?:at most 0 tokens in all, or )?a pool of (\d+) bytes", r"--host-memory=\1", spoken)
    return _renamed(spoken, _option_names(args))


def problem_in_options(problem: str, args: argparse.Namespace) -> str:
    """A problem likewise, but for names without a value.

    What the checkpoint says keeps its name, and so does what stands in a file or a line (behind a colon).
    """
    given = {name for name in _MODEL | _LOADING if getattr(args, name, None) not in (None, "", 0, "auto")}
    options = _option_names(args)
    for name in (_MODEL | _LOADING).keys() - given:
        options.pop(name)
    return _renamed(problem, options, alone=False, before=r"(?<!: )")


def _option_names(args: argparse.Namespace) -> dict[str, str]:
    """Option by field; of two options for a field the one that the command has."""
    options: dict[str, str] = {}
    for option, field in (_SAMPLING | _OFFLOAD | _ENGINE | _MODEL | _LOADING).items():
        if field not in options or hasattr(args, option):
            options[field] = f"--{option.replace('_', '-')}"
    return options


def _renamed(text: str, options: dict[str, str], alone: bool = True, before: str = "") -> str:
    """``text`` with options in the place of fields.

    Args:
        alone: a name without a value counts too.
        before: what must hold in front of a name, as a regular expression.
    """

    def renamed(match: re.Match[str]) -> str:
        option, value = options[match["name"]], match["value"]
        if value is None:
            return option if "_" in match["name"] else match["name"]  # else a word like any other
        if value in ("True", "False"):
            return option if value == "True" else option.replace("--", "--no-", 1)
        return f"{option}={value.strip(_QUOTES)}"

    name = "|".join(sorted(options, key=len, reverse=True))
    value = rf"(?:=(?P<value>'[^']*'|\"[^\"]*\"|[\w.:+-]*\w(?:,\d+)*)){'?' if alone else ''}"
    return re.sub(rf"{before}(?<![\w./{_QUOTES}-])(?P<name>{name})(?![\w.]){value}", renamed, text)


def check_steps(params: SamplingParams, llm: LLM) -> None:
    """Refuse steps that would never be taken: one commits a position of its block at least.

    A canvas counts its steps otherwise.

    Raises:
        InvalidOption: a block has fewer positions.
    """
    if steps := params.denoising_steps:
        config = llm.model.config
        length = config.block_length
        if not (config.full_attention or config.noise):
            check(steps <= length, "--steps", steps, f"use at most {length}, the positions of a block")


def build(
    kind: Callable[..., _Options], args: argparse.Namespace, names: dict[str, str], **more: Any
) -> _Options:
    """The dataclass of the options given (``names``: option -> field) and ``more``; it refuses by option."""
    given = {option: field for option, field in names.items() if hasattr(args, option)}
    try:
        return kind(**{field: getattr(args, option) for option, field in given.items()} | more)
    except InvalidOption as error:
        option = next((option for option, field in given.items() if field == error.field), None)
        if option is None or error.field is None:
            raise
        named = error.problem.replace(error.field, f"--{option.replace('_', '-')}", 1)
        raise InvalidOption(named, error.remedy, error.field) from error


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """`SamplingParams` of the options given; raises `InvalidOption`."""
    return build(SamplingParams, args, _SAMPLING)


def offload_config(args: argparse.Namespace) -> OffloadConfig:
    """`OffloadConfig` of the options given; raises `InvalidOption`."""
    return build(OffloadConfig, args, _OFFLOAD)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """`EngineConfig` of the options given; raises `InvalidOption`."""
    return build(EngineConfig, args, _ENGINE)


def open_model(args: argparse.Namespace, offload: OffloadConfig, engine: EngineConfig) -> LLM:
    """Load the model that the options name; what `LLM` raises passes through.

    torch is imported here, once the options are known to be right.
    """
    from herald import LLM

    return LLM(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        offload=offload,
        engine=engine,
        **overrides(args),
    )


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What stands in for the checkpoint's own: arguments of `herald.models.read_config`."""
    return {name: getattr(args, name) for name in _MODEL}

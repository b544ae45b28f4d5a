"""``herald profile``: run a workload and show where its time goes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald.cli import fields, options
from herald.cli.progress import ProgressBars, ProgressLines
from herald.cli.prompts import collect_prompts
from herald.doctor.units import format_bytes, format_seconds
from herald.errors import InvalidOption, UsageError

if TYPE_CHECKING:
    from herald import LLM
    from herald.profile.summary import Summary
    from herald.profile.workload import Run

DEFAULT_TOKENS, DEFAULT_NEW_TOKENS = 4096, 128
MAX_BLOCKS_SHOWN = 12


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``herald profile``."""
    whole = options.whole
    group = parser.add_argument_group("workload")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text, - for stdin")
    prompt.add_argument(
        "--tokens",
        type=whole,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="prompt of N random tokens (default: %(default)s)",
    )
    group.add_argument(
        "--num-requests",
        type=whole,
        default=1,
        metavar="N",
        help="requests, each with random tokens of its own, or all with the file (default: 1)",
    )
    group.add_argument(
        "--new-tokens",
        type=whole,
        default=DEFAULT_NEW_TOKENS,
        metavar="N",
        help="tokens a request decodes, whatever they are (default: %(default)s)",
    )
    group.add_argument(
        "--steps",
        type=whole,
        default=argparse.SUPPRESS,
        metavar="N",
        help="denoising steps a block may take (default: one a position)",
    )
    group.add_argument(
        "--threshold",
        type=options.threshold,
        default=None,
        metavar="P",
        help="commit every position above this confidence in a step, or auto for the family's: 0.9, off with "
        "full attention (default: off)",
    )
    options.add_cache_option(group.add_argument)
    options.add_model_options(parser)
    options.add_offload_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out",
        type=Path,
        default=Path("herald-profile"),
        metavar="DIR",
        help="folder of trace.json.gz, timeline.png and summary.json (default: %(default)s)",
    )
    group.add_argument("--json", action="store_true", help="print summary.json in place of the tables")
    parser.set_defaults(ignore_eos=True)


def run(args: argparse.Namespace) -> int:
    """Run the workload, write the files, print the summary, and return the exit code."""
    for option in ("tokens", "num_requests"):
        if getattr(args, option) < 1:
            name = f"--{option.replace('_', '-')}"
            raise InvalidOption(f"{name}={getattr(args, option)} is not valid", "use 1 or more")
    params, offload = fields.sampling_params(args), fields.offload_config(args)
    engine = fields.engine_config(args)
    texts = None if args.prompt_file is None else collect_prompts([], [args.prompt_file])
    _make_folder(args.out)
    from herald.profile.workload import run_workload

    count = args.num_requests
    with (
        contextlib.redirect_stdout(sys.stderr),
        fields.open_model(args, offload, engine) as llm,
        ProgressBars(True, count) if sys.stderr.isatty() else ProgressLines(count) as progress,
    ):
        fields.check_steps(params, llm)
        result = run_workload(llm, _prompts(llm, texts, args), params, progress)
    _report(args.model, result, args.out, args.json)
    return 0


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--out {str(path)!r} is not a folder", "name a folder, or one to be made") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--out {str(path)!r} cannot be written ({reason})", "name another folder"
        ) from error


def _prompts(llm: LLM, texts: Sequence[str] | None, args: argparse.Namespace) -> list[list[int]]:
    from herald.engine.limits import check_positions
    from herald.profile.workload import random_prompts

    if texts is not None:
        return [list(llm.tokenizer.encode(texts[0]))] * args.num_requests
    config = llm.model.config
    check_positions(args.tokens, llm.engine.max_model_len, config)  # before ids are drawn for all of them
    return random_prompts(
        args.num_requests, args.tokens, config.vocab_size, config.mask_token_id, config.media_token_ids
    )


def _report(model: str, result: Run, folder: Path, as_json: bool) -> None:
    """Print the summary and write the files; where one of the two fails, the figures are in the other."""
    from herald import __version__
    from herald.profile.summary import summarise

    about = {"herald": __version__, "model": model, **result.facts}
    summary = summarise(result.spans, result.row_bytes, result.resident_bytes, result.kernels)
    report = {"workload": about, "summary": summary.as_json()}
    try:
        if as_json:
            print(json.dumps(report, indent=1), flush=True)
        else:
            print_summary(summary)
    finally:
        _write(folder, result, report)
    if not as_json:
        print(f"Written to {folder}; open trace.json.gz at https://ui.perfetto.dev.")


def _write(folder: Path, result: Run, report: dict[str, Any]) -> None:
    from herald.profile import perfetto, timeline

    perfetto.write_trace(folder / "trace.json.gz", result.spans, report["workload"])
    (folder / "summary.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not timeline.can_draw():
        _say("no timeline.png: matplotlib is missing; run: pip install 'herald-dllm[profile]'")
    elif not timeline.draw_timeline(folder / "timeline.png", result.spans):
        _say("no timeline.png: no block took a step; use more --new-tokens")


def _say(text: str) -> None:
    print(f"herald: {text}", file=sys.stderr)


def print_summary(summary: Summary) -> None:
    """A table of blocks and one of the whole run, on standard output."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    blocks = Table(box=SIMPLE, pad_edge=False)
    for title in ("request", "block", "steps", "denoise", "selection", "transfer", "exposed"):
        blocks.add_column(title, justify="left" if title == "request" else "right")
    shown = summary.blocks[:MAX_BLOCKS_SHOWN]
    for block in shown:
        blocks.add_row(block.request_id, str(block.block), *_times(vars(block)))
    if len(summary.blocks) > len(shown):
        blocks.add_row(f"... {len(summary.blocks) - len(shown)} more", *[""] * 6)
    blocks.add_section()
    blocks.add_row("median", "", *_times(summary.median))
    whole = Table(box=SIMPLE, show_header=False, pad_edge=False)
    whole.add_column("")
    whole.add_column("", justify="right")
    for label, value in lines(summary):
        whole.add_row(label, value)
    console = Console(highlight=False)
    console.print(blocks)
    console.print(whole)


def lines(summary: Summary) -> list[tuple[str, str]]:
    """Label and value of each line about the whole run."""
    times = summary.overlap
    device = []
    if summary.kernel_busy_share is not None and summary.kernels_per_step is not None:
        device.append(("device busy", f"{summary.kernel_busy_share:.1%} of its time, kernels alone"))
        device.append(("kernels", f"{summary.kernels_per_step:.0f} a step"))
    return [
        ("prefill", format_seconds(times.prefill_seconds)),
        ("decode", format_seconds(summary.decode_seconds)),
        ("compute busy", f"{summary.compute_busy_share:.1%} of decode"),
        ("forwards", f"{summary.forwards:,} ({summary.forwards_per_step:.2f} a step)"),
        *device,
        ("selection + transfer", format_seconds(times.selection_and_transfer_seconds)),
        ("of it under forwards", f"{times.overlap_ratio:.1%}"),
        ("bytes moved", format_bytes(summary.bytes_moved)),
        ("selected, but resident", format_bytes(summary.bytes_kept)),
        ("resident sets", format_bytes(summary.resident_bytes)),
        ("written back", format_bytes(summary.bytes_written_back)),
        ("CPU selection", f"{summary.selection_gb_per_second:.2f} GB/s of index"),
        ("copy", f"{summary.copy_gb_per_second:.2f} GB/s"),
        ("write-back", f"{summary.write_back_gb_per_second:.2f} GB/s"),
    ]


def _times(values: dict[str, Any]) -> list[str]:
    names = ("denoise_seconds", "selection_seconds", "transfer_seconds", "exposed_seconds")
    return [
        f"{values['steps']:g}",
        *(format_seconds(values[name]) if values[name] else "-" for name in names),
    ]

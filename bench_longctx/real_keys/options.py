"""Options of the command: what they are, and one check of all of them before any work."""

from __future__ import annotations

import argparse
import math
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench_longctx.output import check_file
from bench_longctx.real_keys.block import BLOCK_STEP, block_starts, room
from bench_longctx.real_keys.mass import RECENT_ROWS, SINK_ROWS, Span
from herald import hardware
from herald.cli.options import number, whole
from herald.config import check
from herald.errors import UsageError
from herald.kvstore.native import BACKENDS

# How the two texts begin within the haystack.
TEXTS = {"manual": b"initdb creates a new PostgreSQL", "novel": b"Sir Walter Elliot, of Kellynch"}
# Host memory a token takes at most, in blocks of 32: peaks of 250 KiB and 13 KiB were seen, rounded up.
_BYTES_A_TOKEN = {"smollm2": 256 << 10, "random": 16 << 10}
_USUAL_BLOCK = 32


def parse(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The options given; they may still be wrong, see `check_options`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokens", type=whole, default=8192, help="of the text (default: %(default)s)")
    parser.add_argument(
        "--blocks", type=whole, default=16, help="spread over the text's second half (default: %(default)s)"
    )
    parser.add_argument(
        "--block-length", type=whole, default=32, help=f"1 to {RECENT_ROWS} (default: %(default)s)"
    )
    parser.add_argument(
        "--budgets",
        type=number,
        nargs="+",
        default=[0.02, 0.05, 0.10],
        metavar="SHARE",
        help="rows of a set / rows of the prefix, in (0, 1] (default: 0.02 0.05 0.1)",
    )
    parser.add_argument("--text", choices=TEXTS, default="manual", help="default: %(default)s")
    parser.add_argument(
        "--keys",
        choices=["smollm2", "random"],
        default="smollm2",
        help="random: to try the tool without a model",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of index and selector")
    parser.add_argument("--threads", type=whole, default=0, help="of the selector, 0 for all usable cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="report")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder of three pictures, made if missing")
    return parser.parse_args(argv)


def check_options(args: argparse.Namespace) -> None:
    """Refuse what could not be measured, drawn or written.

    Raises:
        UsageError: names the option, its value and one that works.
    """
    length, blocks = args.block_length, args.blocks
    check(1 <= length <= RECENT_ROWS, "--block-length", length, f"use 1 to {RECENT_ROWS}")
    check(blocks >= 1, "--blocks", blocks, "use 1 or more")
    check(args.threads >= 0, "--threads", args.threads, "use 0 for all usable cores, or more")
    check(
        args.tokens >= 1, "--tokens", args.tokens, f"use {least_tokens(blocks, length)} for --blocks={blocks}"
    )
    _check_budgets(args.budgets)
    _check_memory(args.tokens, args.keys, length)
    _check_room(args.tokens, blocks, length, min(args.budgets))
    check_file(args.json)
    if args.plots is not None:
        _check_plots(args.plots)


def least_tokens(blocks: int, block_length: int) -> int:
    """The fewest tokens whose second half has room for blocks, the first with a row before it to choose.

    Some larger numbers have not: the second half begins with a block.
    """
    before = block_length + SINK_ROWS + RECENT_ROWS + 1
    first = max(blocks, -(-before // BLOCK_STEP))  # in steps, as where the second half begins
    return max(2 * (first - 1) * BLOCK_STEP + 1, (first + blocks - 1) * BLOCK_STEP + block_length)


def _room_for(tokens: int, block_length: int) -> int:
    """Blocks that fit; 0 too where the first has not one row before it that a set may choose."""
    first, last = room(tokens, block_length)
    span = Span(BLOCK_STEP * first - block_length)
    return max(last - first + 1, 0) if span.prefix > 0 and span.last > span.first else 0


def _check_budgets(budgets: list[float]) -> None:
    for budget in budgets:
        check(0 < budget <= 1, "--budgets", budget, "use shares in (0, 1], such as 0.05")
    named = [f"{budget:g}" for budget in budgets]  # as the report has them
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--budgets has {twice} twice", "give each budget once")


def _check_memory(tokens: int, keys: str, block_length: int) -> None:
    a_token = _BYTES_A_TOKEN[keys] * max(block_length, _USUAL_BLOCK) // _USUAL_BLOCK
    most = hardware.memory().free // a_token
    if tokens > most:
        raise UsageError(
            f"--tokens={tokens} takes up to {tokens * a_token / 2**30:.1f} GiB of host memory, of which "
            f"{most * a_token / 2**30:.1f} are free",
            f"use {most} or less",
        )


def _check_room(tokens: int, blocks: int, block_length: int, least: float) -> None:
    most = _room_for(tokens, block_length)
    if most < blocks:
        fewer = f", or --blocks={most} at most" if most else ""
        raise UsageError(
            f"{blocks} blocks of {block_length} do not fit the second half of {tokens} tokens",
            f"use --tokens={least_tokens(blocks, block_length)}{fewer}",
        )
    span = Span(block_starts(tokens, blocks, block_length)[0] - block_length)
    if span.rows_chosen(least) == 0:
        rows = SINK_ROWS + RECENT_ROWS
        enough = math.ceil(1e4 * (rows + 1) / span.prefix) / 1e4
        raise UsageError(
            f"{least:g} of {span.prefix} rows is sinks and recent rows only ({rows})",
            f"use --budgets of {min(enough, 1):g} or more, or more --tokens",
        )


def _check_plots(folder: Path) -> None:
    if find_spec("matplotlib") is None:
        raise UsageError("no --plots: matplotlib is missing", "run: pip install 'herald-dllm[profile]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--plots {folder} cannot be written: {reason}", "name a folder, or one to be made"
        ) from error

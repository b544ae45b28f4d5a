"""``herald models``: the families of the registry, their checkpoints, and what of them is verified."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_models_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``herald models``."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print, and return the exit code."""
    report = json_report()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def json_report() -> dict[str, Any]:
    """The object that ``--json`` prints: families in the order of the registry, and what the checks mean."""
    from herald.models import PRESETS
    from herald.models.loader import num_active_parameters, num_parameters
    from herald.models.registry import CHECKS, FAMILIES

    families = [
        {
            "name": family.name,
            "title": family.title or family.name,
            "architectures": list(family.architectures),
            "paper": family.paper,
            "hub_ids": list(family.hub_ids),
            "block_length": family.block_length,
            "mask_token_id": family.mask_token_id,
            "policy": family.policy,
            "presets": {
                name: {"parameters": num_parameters(config), "active": num_active_parameters(config)}
                for name, config in PRESETS.items()
                if config.family == family.name
            },
            "verified": list(family.verified),
            "golden": list(family.golden),
        }
        for family in FAMILIES
    ]
    return {"families": families, "checks": dict(CHECKS)}


def print_report(report: dict[str, Any]) -> None:
    """A table of the families, and below it what the checks mean."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    # names are there to be read and copied: none is cut at 80 columns, which a pipe has
    words = [word for family in report["families"] for word in family["title"].split()]
    table.add_column("family", style="bold", min_width=max(map(len, words)))
    table.add_column("architecture, released checkpoints", no_wrap=True)
    table.add_column("block")
    table.add_column("verified")
    for family in report["families"]:
        table.add_row(
            family["title"],
            "\n".join([*family["architectures"], *family["hub_ids"]]),
            str(family["block_length"] or "all"),
            ", ".join(family["verified"]) or "nothing yet",
        )
    console = Console(highlight=False)
    console.print(table)
    for name, meaning in report["checks"].items():
        console.print(f"{name}: {meaning}")
    console.print("The bundled model is tiny (SDAR). Any folder with one of these architectures can be used.")

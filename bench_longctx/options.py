"""Kinds of options that benchmarks share, refused where they are parsed, and the device they need."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from herald.cli.options import number, whole
from herald.errors import CudaUnavailable


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` on."""

    def parse(text: str) -> int:
        value = whole(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is not valid; use {least} or more")
        return value

    return parse


def share(text: str) -> float:
    """A share in [0, 1]."""
    value = number(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value:g} is not a share; use 0 to 1, such as 0.68")
    return value


def seconds(text: str) -> float:
    """A time that ends, and is not over when it begins."""
    value = number(text)
    if not (value > 0.0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{value:g} is no time; use more than 0, such as 140")
    return value


def need_cuda(tiny: bool, remedy: str = "use --tiny") -> bool:
    """Whether a CUDA device is visible.

    Args:
        tiny: sizes that need none.

    Raises:
        CudaUnavailable: there is none, and the sizes are those of one.
    """
    import torch

    if torch.cuda.is_available():
        return True
    if not tiny:
        raise CudaUnavailable("no CUDA device is visible", remedy)
    return False

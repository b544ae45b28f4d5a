"""Selection methods by name, one file each (or one family). `get` finds them; `Method` says what one is."""

from __future__ import annotations

from bench_longctx.quality.methods.base import Method, Switches, attach
from bench_longctx.quality.methods.centre import Centre
from bench_longctx.quality.methods.dense import Dense
from bench_longctx.quality.methods.operators import OPERATORS, operator_part
from bench_longctx.quality.methods.own_queries import (
    LookaheadHold,
    LookaheadK,
    LookaheadLate,
    LookaheadOne,
    LookaheadRefresh,
    OwnHold,
    OwnStepZero,
)
from bench_longctx.quality.methods.page_bounds import Quest
from bench_longctx.quality.methods.partial_keys import PartialKeys
from bench_longctx.quality.methods.previous_block import PreviousBlock
from bench_longctx.quality.methods.window_sinks import WindowSinks
from herald.errors import InvalidOption

ALL: tuple[Method, ...] = (
    Dense(),
    WindowSinks(),
    OwnStepZero(),
    OwnHold(),
    Centre(),
    LookaheadOne(),
    LookaheadK(),
    LookaheadLate(),
    LookaheadRefresh(),
    LookaheadHold(),
    PreviousBlock(),
    Quest(),
    PartialKeys(),
)
NAMES = tuple(method.name for method in ALL)

__all__ = ["ALL", "NAMES", "OPERATORS", "Method", "Switches", "attach", "get", "operator_part"]


def get(name: str) -> Method:
    """The method of that name.

    Raises:
        InvalidOption: there is none; says which there are.
    """
    for method in ALL:
        if method.name == name:
            return method
    raise InvalidOption(f"method={name!r} is not known", f"use one of {', '.join(NAMES)}")

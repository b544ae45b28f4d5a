"""Typed reading of a JSON configuration: a field that holds the wrong kind is named, with what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from herald.config import is_number, is_whole
from herald.errors import WeightsError


def integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The integer under ``key``; ``default`` where it is absent or null."""
    value = raw.get(key)
    value = default if value is None else value
    if not is_whole(value):
        raise _wrong(key, value, "an integer")
    return value  # type: ignore[return-value]


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The finite number under ``key``; ``default`` where it is absent or null."""
    value = raw.get(key)
    value = default if value is None else value
    if not (is_number(value) and math.isfinite(value)):  # type: ignore[arg-type]
        raise _wrong(key, value, "a finite number")
    return float(value)  # type: ignore[arg-type]


def table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object under ``key``, empty where it is absent or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(key, value, "an object")
    return dict(value or {})


def names(raw: Mapping[str, Any], key: str) -> list[str]:
    """The list of strings under ``key``, empty where it is absent or null."""
    value = raw.get(key)
    value = [] if value is None else value
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise _wrong(key, value, "a list of names")
    return value


def token_ids(key: str, value: Any) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple."""
    many = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_whole(each) for each in many):
        raise _wrong(key, value, "a token id or a list of them")
    return tuple(many)


def _wrong(key: str, value: object, kind: str) -> WeightsError:
    return WeightsError(f"config.json: {key}={value!r} is not {kind}", f"restore the checkpoint's {key}")

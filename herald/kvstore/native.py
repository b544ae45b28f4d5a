"""The C++ extension ``herald._native``: whether it is there, and which instructions it would run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Literal, NamedTuple

from herald.config import check
from herald.errors import UsageError

Backend = Literal["auto", "native", "numba"]
BACKENDS = ("auto", "native", "numba")

# What the functions of this version's extension take and give.
_INTERFACE = 7


class Native(NamedTuple):
    """The extension, or why there is none.

    Attributes:
        module: ``herald._native``, None where it cannot be used.
        reason: why not, or "".
    """

    module: Any | None
    reason: str


@functools.cache
def find_native() -> Native:
    """Look for the extension once a process."""
    try:
        module = importlib.import_module("herald._native")
    except ImportError as error:
        absent = importlib.util.find_spec("herald._native") is None
        return Native(None, "herald._native is not built" if absent else f"herald._native: {error}")
    if getattr(module, "INTERFACE", 0) != _INTERFACE:
        return Native(None, "herald._native was built from another version's sources")
    return Native(module, "")


def native_for(backend: Backend) -> Any | None:
    """The extension if ``backend`` wants it and it is there; None for numba.

    Raises:
        InvalidOption: the backend is unknown.
        UsageError: "native" is asked for and the extension is not there.
    """
    check(backend in BACKENDS, "backend", backend, f"use one of {', '.join(BACKENDS)}")
    if backend == "numba":
        return None
    found = find_native()
    if backend == "native" and found.module is None:
        raise UsageError(f"backend='native' cannot be used: {found.reason}", "use backend='auto'")
    return found.module

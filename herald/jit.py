"""The decorator of every function that numba compiles."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on its first call, to run without the GIL, and keep the result on disk.

    Numba caches in NUMBA_CACHE_DIR, in ``__pycache__`` beside the module or in ``~/.cache``, and its
    decorator raises where none of them can be written: in a read-only container, say. Every process then
    compiles for itself, and one warning says so.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        _warn_once()
        return njit(nogil=True)(function)


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "compiled functions are not kept, so every process compiles them again; "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )

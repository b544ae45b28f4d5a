"""Compiled functions, with a folder for their cache and without one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numba
import pytest
from numba.core.caching import _CacheLocator

from herald import jit as module
from herald.jit import jit

ROOT = Path(__file__).resolve().parents[2]

READ_ONLY = """
from numba.core.caching import _CacheLocator

def refuse(self):
    raise PermissionError(self.get_cache_path())

_CacheLocator.ensure_cache_path = refuse
"""


def double(x: int) -> int:
    return 2 * x


@pytest.fixture(autouse=True)
def forget_warning() -> Iterator[None]:
    module._warn_once.cache_clear()
    yield
    module._warn_once.cache_clear()


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: _CacheLocator) -> NoReturn:
        raise PermissionError(self.get_cache_path())

    monkeypatch.setattr(_CacheLocator, "ensure_cache_path", refuse)


def test_functions_are_kept_where_numba_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit(double)(4) == 8
    assert list(tmp_path.rglob("*double*.nbi")) and list(tmp_path.rglob("*double*.nbc"))


def test_without_a_folder_functions_compile_and_one_warning_says_so(read_only: None) -> None:
    with pytest.raises(RuntimeError, match="cannot cache function"):
        numba.njit(cache=True)(double)
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as caught:
        first, second = jit(double), jit(double)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert first(4) == second(4) == 8


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> NoReturn:
        raise RuntimeError("Unknown cache locator class")

    monkeypatch.setattr(module, "njit", fail)
    with pytest.raises(RuntimeError, match="Unknown cache locator"):
        jit(double)


def test_all_parts_import_without_a_folder() -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"{READ_ONLY}\nimport herald.select, herald.kvstore, herald.transfer"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("RuntimeWarning") == 1

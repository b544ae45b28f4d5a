"""Which backend is taken, and what is said where the extension cannot be used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from herald.errors import InvalidOption, UsageError
from herald.kvstore import native


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    native.find_native.cache_clear()
    yield
    native.find_native.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    def load(name: str) -> object:
        if isinstance(module, ImportError):
            raise module
        return module

    monkeypatch.setattr(importlib, "import_module", load)


def test_an_extension_of_this_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(INTERFACE=native._INTERFACE)
    pretend(monkeypatch, module)
    assert native.native_for("auto") is native.native_for("native") is module
    assert native.native_for("numba") is None


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SimpleNamespace(), "another version"),
        (SimpleNamespace(INTERFACE=native._INTERFACE - 1), "another version"),
        (ImportError("undefined symbol"), "undefined symbol|not built"),
    ],
)
def test_without_one_numba_is_taken(module: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, module)
    assert native.native_for("auto") is None
    with pytest.raises(UsageError, match=reason):
        native.native_for("native")


def test_unknown_backend() -> None:
    with pytest.raises(InvalidOption, match="auto, native, numba"):
        native.native_for("torch")  # type: ignore[arg-type]

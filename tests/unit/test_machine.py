"""What a figure was measured with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench_longctx import machine


def test_the_commit_is_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of one, or without git, there is none."""
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.describe()["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for step in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x"], ["tag", "v1"]):
        subprocess.run([*git, *step], check=True)
    commit = machine.describe()["commit"]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit and head.startswith(commit)
    (tmp_path / "file").write_text("2")
    assert machine.describe()["commit"] == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert machine.describe()["commit"] is None

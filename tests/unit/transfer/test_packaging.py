"""Every CUDA source travels in the wheel and in the source distribution."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from herald.transfer.gather_kernel import SOURCES

setuptools = pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not a checkout")


@pytest.mark.parametrize(("editable", "expected"), [(False, set(SOURCES.values())), (True, set())])
def test_the_wheel_has_the_cuda_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, editable: bool, expected: set[str]
) -> None:
    monkeypatch.setenv("HERALD_BUILD_EXT", "0")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    command_class = runpy.run_path(str(ROOT / "setup.py"))["BuildPyWithCuda"]
    monkeypatch.setattr(command_class.__base__, "run", lambda self: None)
    command = command_class(setuptools.Distribution())
    command.build_lib, command.editable_mode = str(tmp_path), editable
    command.run()
    assert {path.name for path in tmp_path.glob("herald/_csrc/*")} == expected


def test_the_source_distribution_has_the_cuda_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    from setuptools.command.egg_info import FileList

    monkeypatch.chdir(ROOT)
    files = FileList()
    for line in Path("MANIFEST.in").read_text(encoding="utf-8").splitlines():
        if "csrc" in line:
            files.process_template_line(line)
    assert {f"csrc/{name}" for name in SOURCES.values()} <= set(files.files)

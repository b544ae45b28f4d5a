"""Every benchmark refuses a report that it could not write, and ends with one line where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from bench_longctx import output
from herald.errors import HeraldError, UsageError


def unwritable(folder: Path) -> dict[str, Path]:
    """Files that cannot be written, by what is wrong with them."""
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    return {
        "there is no folder": folder / "missing" / "out.json",
        "is no folder": folder / "file" / "out.json",
        "it is a folder": folder,
        "not a regular file": Path("/dev/full"),
        "not a regular file, a pipe": folder / "pipe",
        "too long": folder / ("n" * 300),
        "null byte": folder / "a\0b",
        "symbolic links": folder / "loop",
    }


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for wrong, path in unwritable(tmp_path).items():
        with pytest.raises(UsageError, match="--out .*; name another file") as caught:
            output.check_file(path, "--out")
        assert wrong.split(",")[0] in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        output.check_file(tmp_path / "out.json")


def test_what_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("held")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for path in (None, tmp_path / "there", tmp_path / "new", tmp_path / "link"):
        output.check_file(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    assert (tmp_path / "there").read_text() == "held"


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (None, 0, ""),
        (UsageError("3 is\nwrong", "use 4"), 2, "error: 3 is wrong; use 4\n"),
        (HeraldError("full", "use less"), 2, "error: full; use less\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left"), 1, "error: [Errno 28] No space left\n"),
    ],
)
def test_a_benchmark_ends_with_a_line_and_a_code(
    raised: BaseException | None, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @output.command
    def main() -> int:
        if raised is not None:
            raise raised
        return 0

    assert main() == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_output_is_one_line(buffered: str) -> None:
    """Also where the text is held back until the end, and the interpreter would try once more."""
    program = "from bench_longctx import output; raise SystemExit(output.command(lambda: print('x'))())"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == output.FAILED
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_fault_keeps_its_traceback() -> None:
    @output.command
    def main() -> int:
        raise ValueError("of the benchmark itself")

    with pytest.raises(ValueError, match="itself"):
        main()


# Options without which they do not run here.
BENCHMARKS = {
    "throughput.run": ["--tiny"],
    "kernels.bench_kernels": ["--tiny"],
    "kernels.bench_experts": ["--tiny"],
    "selection.bench_select": ["--tiny"],
    "transfer.bench_gather": [],
    "transfer.bench_interference": ["--tiny"],
    "prefix.run": [],
    "long_prompt.run": ["tiny"],
    "serving.bench_stall": [],
}


def main_of(name: str) -> Callable[[list[str]], int]:
    main: Callable[[list[str]], int] = import_module(f"bench_longctx.{name}").main
    return main


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_tries_its_file_first(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, path in unwritable(tmp_path).items():
        assert main_of(name)([*BENCHMARKS[name], "--json", str(path)]) == output.REFUSED
        shown = capsys.readouterr()
        assert shown.err.startswith("error: --json ") and wrong.split(",")[0] in shown.err
        assert shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_interrupted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(path: Path | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "check_file", interrupt)
    assert main_of(name)(BENCHMARKS[name]) == output.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"

from __future__ import annotations

import re
from itertools import groupby

import pytest

from herald.cli import progress
from herald.cli.progress import ProgressBars, ProgressLines
from herald.outputs import Progress


def test_bars_add_requests_up(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars(True, num_requests=2) as bars:
        bars(Progress("a", "prefill", 100, 400))
        bars(Progress("b", "prefill", 50, 100))
        bars(Progress("a", "prefill", 400, 400))
        bars(Progress("a", "decode", 4, 16))
    captured = capsys.readouterr()
    assert captured.out == ""
    shown = re.findall(r"prefill: *(\d+)%", captured.err)
    # 100 of twice 400, 150 of 500, 450 of 500
    assert [percent for percent, _ in groupby(shown)][-3:] == ["12", "30", "90"]
    assert re.search(r"decode *: *12%", captured.err)  # 4 of twice 16


def test_disabled_bars_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars(False) as bars:
        bars(Progress("a", "prefill", 1, 2))
        bars(Progress("a", "decode", 1, 2))
    assert capsys.readouterr().err == ""


def test_a_phase_without_a_bar_clears_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars(True, phases=("prefill",)) as bars:
        bars(Progress("a", "prefill", 1, 2))
        capsys.readouterr()
        bars(Progress("a", "decode", 1, 2))
        cleared = capsys.readouterr().err
        bars(Progress("a", "decode", 2, 2))
    assert cleared.strip(" \r\n") == "" and "\r" in cleared
    assert capsys.readouterr().err == ""


def test_lines_come_at_most_so_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with ProgressLines(num_requests=2) as lines:
        for clock[0], event in (
            (109.9, Progress("a", "prefill", 100, 4000)),
            (110.0, Progress("a", "prefill", 1000, 4000)),
            (119.9, Progress("b", "prefill", 3000, 4000)),
            (120.5, Progress("b", "prefill", 4000, 4000)),
            (140.0, Progress("a", "decode", 8, 16)),
        ):
            lines(event)
    assert capsys.readouterr() == (
        "",
        "herald: prefill 12% of 8,000 token-layers\n"
        "herald: prefill 62% of 8,000 token-layers\n"
        "herald: decode 25% of 32 tokens\n",
    )

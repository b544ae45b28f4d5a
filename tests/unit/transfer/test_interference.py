"""The interference benchmark on the CPU: its sections run, and its shapes fit where they are meant to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench_longctx.transfer import interference, variants
from bench_longctx.transfer.bench_interference import main
from bench_longctx.transfer.beside import Beside, _bytes_within
from bench_longctx.transfer.report import table
from herald.transfer import zero_copy
from herald.transfer.threads import HostTicket


@pytest.mark.parametrize("kib", variants.SHARED_KIB)
@pytest.mark.parametrize("row_bytes", [256, 512, 1024])
def test_shapes_use_the_shared_memory_they_are_named_after(kib: int, row_bytes: int) -> None:
    kernel = variants.bulk(kib, row_bytes)
    assert 0.7 * (kib << 10) < kernel.shared_bytes(row_bytes) <= kib << 10
    assert kernel.problem((9, 0), row_bytes, 16) == ""


def test_the_default_is_the_shape_that_was_measured() -> None:
    assert variants.bulk(200, 512) == zero_copy.KERNEL


def test_a_difference_lies_in_the_pages_of_its_layers_and_heads() -> None:
    move = variants.difference_move(
        np.random.default_rng(0), 1000, layers=3, heads=2, positions=256, arrivals=4, page_size=32
    )
    rows = (move.src_rows - 1000).reshape(3, 2, 4)
    assert len(np.unique(move.src_rows)) == 24 and move.dst_rows.tolist() == list(range(24))
    for layer in range(3):
        for head in range(2):
            page, offset = np.divmod(rows[layer, head], 32)
            assert (page // 2 // 8 == layer).all() and (page % 2 == head).all()
            assert (np.diff(page * 32 + offset) > 0).all()


def test_bytes_within_a_window() -> None:
    ticket = HostTicket(100)
    ticket.finish((2.0, 4.0))
    assert _bytes_within(ticket, 0.0, 10.0) == 100
    assert _bytes_within(ticket, 3.0, 10.0) == 50
    assert _bytes_within(ticket, 3.0, 3.5) == 25
    assert _bytes_within(ticket, 5.0, 6.0) == 0


def test_every_section_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "interference.json"
    assert main(["--tiny", "--json", str(out)]) == 0
    assert "NaN" not in out.read_text()
    results = json.loads(out.read_text())["results"]
    assert {r["section"] for r in results} == {"pool", "alone", "beside", "partition"}
    assert not [r for r in results if "error" in r and r["section"] != "partition"]
    assert "ms of denoising lost per GB" in capsys.readouterr().out


def test_a_variant_without_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--only", "alone", "--seconds", "1e-9"])
    assert "left out: no time" in capsys.readouterr().out


def test_the_table_begins_with_the_cheapest() -> None:
    cell = {"section": "beside", "slowdown_percent": 1.0, "gb_per_s": 20.0, "requests": 1}
    text = table([cell | {"what": "dear", "ms_per_gb": 9.0}, cell | {"what": "cheap", "ms_per_gb": 0.5}])
    assert text.index("cheap") < text.index("dear")
    assert table([{"section": "pool", "what": "ready", "all": 1.0}]) == ""


@pytest.mark.parametrize(
    "options",
    [
        *(["--requests", "0"], ["--requests", "8", "-1"], ["--requests", "many"]),
        *(["--seconds", "0"], ["--seconds", "-3"], ["--seconds", "nan"], ["--seconds", "inf"]),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--tiny", *options])
    assert caught.value.code == 2
    assert f"argument {options[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--only", "pool"], ["--probe"], ["--probe", "--tiny"]])
def test_without_a_device_only_tiny_sizes_run(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(options) == 2
    told = "leave --probe out" if "--probe" in options else "use --tiny"
    assert f"error: no CUDA device is visible; {told}" in capsys.readouterr().err


@pytest.mark.parametrize("per_gb", [None, 0.002])
def test_no_figure_is_made_of_rows_that_did_not_arrive(
    per_gb: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the report, which stays JSON."""
    found = Beside(step_seconds=0.1, gb_per_second=0.0, slowdown=0.1, seconds_per_gb=per_gb)
    monkeypatch.setattr(interference, "run_beside", lambda *args: found)
    out = tmp_path / "out.json"
    assert main(["--tiny", "--only", "beside", "--json", str(out)]) == 0
    assert "nan" not in capsys.readouterr().out.lower()
    results = [r for r in json.loads(out.read_text())["results"] if "slowdown_percent" in r]
    assert results and all(r.get("ms_per_gb") == (per_gb and 2.0) for r in results)

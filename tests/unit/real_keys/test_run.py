"""The command from end to end, on random keys: no package, no model."""

from __future__ import annotations

import json
import math

import pytest

from bench_longctx.real_keys import run
from bench_longctx.real_keys.block import BEST, OWN_MAX
from bench_longctx.real_keys.table import share_of
from bench_longctx.real_keys.tally import index_label

OPTIONS = ["--keys", "random", "--tokens", "3072", "--blocks", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real_keys")
    path, plots = folder / "out.json", folder / "plots"
    assert run.main([*OPTIONS, "--budgets", "0.05", "0.1", "--json", str(path), "--plots", str(plots)]) == 0
    for name in ("budget", "index", "overlap"):
        assert 0 < (plots / f"real_keys_{name}.png").stat().st_size < 150_000
    return json.loads(path.read_text())


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [value] if isinstance(value, float) else []


def test_report_is_complete(report):
    assert report["source"] == {"model": "random"}
    assert "torch" in report["machine"]["versions"]
    assert report["starts"] == [1536, 3008]
    assert all(math.isfinite(x) for x in numbers(report["results"]))
    assert {m["label"] for m in report["results"]["methods"] if m["group"] == "index"} >= {
        index_label(bits, operator) for bits in (16, 8, 4, 1) for operator in ("max", "sum")
    }
    assert 0 < report["bars"]["default_of_best"] <= 1


def test_no_set_holds_more_than_the_best(report):
    wider = {"x 1.75 rows", "best"}
    for method in report["results"]["methods"]:
        for budget, cell in method["budgets"].items():
            assert 0 < cell["share"] <= 1
            assert cell["share_p10"] <= cell["share"] + 0.2
            if method["group"] not in wider and method["label"] != "recent window only, no sinks":
                assert cell["share"] <= share_of(report["results"], *BEST, budget) + 1e-5
                assert cell["relative"] <= 1 + 1e-5


def test_runtime_agrees_with_exact_arithmetic(report):
    """16 bits are the pool's bfloat16, so equal up to the rounding of the keys."""
    for budget in ("0.05", "0.1"):
        exact = share_of(report["results"], *OWN_MAX, budget)
        assert share_of(report["results"], "index", "16 bits, max", budget) == pytest.approx(exact, rel=5e-3)
        assert share_of(report["results"], "index", "16 bits, sum", budget, "relative") > 0.995


def test_sizes_by_own_mass_gain_over_uniform(report):
    by_name = {(m["group"], m["label"]): m["budgets"] for m in report["results"]["adaptive"]}
    for budget in ("0.05", "0.1"):
        uniform = by_name["own mass", "uniform"][budget]
        assert uniform["relative"] == pytest.approx(1)
        assert uniform["largest_head_over_mean"] == 1
        layer, everything = (
            by_name["own mass", f"water-filling {scope}"][budget] for scope in ("in a layer", "over layers")
        )
        assert everything["share"] >= layer["share"] - 1e-5 >= uniform["share"] - 2e-5


def test_rows_of_the_recent_window_are_resident_too(report):
    """Random rows are chosen evenly, and 32 of the candidates were in the window of the block before."""
    overlap = report["results"]["overlap"]
    for name in ("best sets", "all positions, max"):
        for budget, again in overlap[f"{name}: chosen again"].items():
            added = overlap[f"{name}: already resident"][budget]["mean"] - again["mean"]
            assert 0.25 * 32 / 3008 < added < 4 * 32 / 1536


def test_table_has_every_method_and_the_bars(report, capsys):
    run.show(report)
    text = capsys.readouterr().out
    for method in report["results"]["methods"]:
        assert method["label"] in text
    assert "best mass" in text and "chosen again" in text


def test_without_the_budget_of_the_bars(capsys):
    assert run.main([*OPTIONS[:4], "--blocks", "1", "--threads", "1", "--budgets", "0.2"]) == 0
    assert "best mass" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block-length", "65"], "use 1 to 64"),
        (["--budgets", "0.01"], "use more --tokens"),
        (["--blocks", "100"], "use at most"),
    ],
)
def test_impossible_options(options, message, capsys):
    assert run.main([*OPTIONS, *options]) == 2
    assert message in capsys.readouterr().err


def test_text_is_technical_english():
    text = run.text_of("manual", 100)
    assert text.startswith("initdb creates a new PostgreSQL database cluster.")
    assert run.text_of("novel", 100).startswith("Sir Walter Elliot")

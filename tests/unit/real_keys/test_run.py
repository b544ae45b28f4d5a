"""The command from end to end, on random keys: no package, no model."""

from __future__ import annotations

import json
import math
import re

import pytest

from bench_longctx.real_keys import options, run
from bench_longctx.real_keys.block import BEST, OWN_MAX
from bench_longctx.real_keys.table import share_of
from bench_longctx.real_keys.tally import index_label
from herald.errors import UsageError

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


LONG = "x" * 300
GOOD = [*OPTIONS, "--blocks", "1", "--budgets", "0.1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--block-length", "65"], "--block-length=65 is not valid; use 1 to 64"),
        (["--block-length", "0"], "--block-length=0 is not valid; use 1 to 64"),
        (["--blocks", "0"], "--blocks=0 is not valid; use 1 or more"),
        (["--blocks", "100"], "use --tokens=12768, or --blocks=24 at most"),
        (["--tokens", "64"], "use --tokens=160\n"),
        (["--tokens", "0"], "--tokens=0 is not valid; use 160 for --blocks=1"),
        (["--tokens", "-5"], "--tokens=-5 is not valid; use 160 for --blocks=1"),
        (["--tokens", "99999999999"], "GiB of host memory, of which"),
        (["--threads", "-1"], "--threads=-1 is not valid; use 0 for all usable cores, or more"),
        (["--budgets", "0.01"], "sinks and recent rows only (68); use --budgets of 0.0459 or more"),
        (["--budgets", "0.1", "0.2", "0.1"], "--budgets has 0.1 twice"),
        (["--budgets", "0.1", "0.10000001"], "--budgets has 0.1 twice"),
        *(
            (["--budgets", "0.1", text], f"--budgets={value} is not valid; use shares in (0, 1]")
            for text, value in (("nan", "nan"), ("2", "2.0"), ("0", "0.0"), ("-1", "-1.0"), ("inf", "inf"))
        ),
        (["--json", "{tmp}/none/out.json"], "--json {tmp}/none/out.json cannot be written"),
        (["--json", "{tmp}"], "--json {tmp} cannot be written"),
        (["--json", "/dev/full"], "--json /dev/full cannot be written"),
        (["--json", f"{{tmp}}/{LONG}"], "cannot be written"),
        (["--plots", "/dev/null/x"], "--plots /dev/null/x cannot be written"),
        (["--plots", "/dev/null"], "--plots /dev/null cannot be written"),
        (["--plots", f"{{tmp}}/{LONG}"], "name a folder, or one to be made"),
    ],
)
def test_impossible_options_are_refused_before_the_work(given, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "run", lambda args: pytest.fail("the work began"))
    given = [option.replace("{tmp}", str(tmp_path)) for option in given]
    assert run.main([*GOOD, *given]) == 2
    out, err = capsys.readouterr()
    assert message.replace("{tmp}", str(tmp_path)) in err
    assert (out, err.count("\n")) == ("", 1) and err.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_plots_without_matplotlib_are_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "run", lambda args: pytest.fail("the work began"))
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert run.main([*GOOD, "--plots", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.endswith(
        "matplotlib is missing; run: pip install 'herald-dllm[profile]'\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("block_length", [1, 32, 64])
def test_the_tokens_named_are_the_fewest(block_length):
    """A text of as many has room for the blocks, and a first set to choose; no shorter one has."""

    def fits(tokens, blocks):
        args = options.parse("", ["--tokens", str(tokens), "--blocks", str(blocks), "--keys", "random"])
        args.block_length, args.budgets = block_length, [1.0]
        try:
            options.check_options(args)
        except UsageError:
            return False
        return True

    for blocks in range(1, 6):
        least = options.least_tokens(blocks, block_length)
        assert fits(least, blocks)
        assert not any(fits(tokens, blocks) for tokens in range(least))


@pytest.mark.parametrize("tokens", ["160", "3072"])
def test_the_least_budget_named_works(tokens, capsys):
    argv = [*OPTIONS, "--tokens", tokens, "--blocks", "1"]
    assert run.main([*argv, "--budgets", "0.001"]) == 2
    named = re.search(r"--budgets of ([\d.]+) or more", capsys.readouterr().err)
    assert run.main([*argv, "--budgets", named[1]]) == 0


def test_an_interruption_is_one_line(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    assert run.main(GOOD) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_the_table_stands_before_files_that_fail(report, tmp_path, capsys, monkeypatch):
    """A disk may fill up while a run measures."""

    def full(path, report):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "run", lambda args: report)
    monkeypatch.setattr(run, "write_report", full)
    assert run.main([*GOOD, "--json", str(tmp_path / "out.json")]) == 1
    out, err = capsys.readouterr()
    assert report["results"]["methods"][0]["label"] in out
    assert "No space left on device" in err and err.count("\n") == 1


def test_the_files_are_written_where_the_table_fails(report, tmp_path, capsys, monkeypatch):
    def leaves(report):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "run", lambda args: report)
    monkeypatch.setattr(run, "show", leaves)
    path = tmp_path / "out.json"
    assert run.main([*GOOD, "--json", str(path), "--plots", str(tmp_path)]) == 1
    assert json.loads(path.read_text()) == report and len(list(tmp_path.iterdir())) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_text_is_technical_english():
    text = run.text_of("manual", 100)
    assert text.startswith("initdb creates a new PostgreSQL database cluster.")
    assert run.text_of("novel", 100).startswith("Sir Walter Elliot")

"""The picture of scores, and the report of methods that it is made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench_longctx.quality import methods, plot
from bench_longctx.quality.report import difference_of, headings, load, repeated, tasks_of
from bench_longctx.tasks import TASKS as ALL_TASKS
from bench_longctx.tasks import structured
from herald.errors import UsageError

MEASURED = Path(__file__).parents[3] / "bench_longctx" / "results" / "quality_methods.json"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("quality_methods.json", 206),
        ("quality_index.json", 53),
        *((f"quality_pairs_seed{seed}.json", 3) for seed in range(8, 12)),
    ],
)
def test_the_measured_cells_hold_together(name: str, least: int):
    """Scores are means over documents that `dense` saw too, and differences those of the scores."""
    path = MEASURED.with_name(name)
    settings, cells = load(path)
    assert len(cells) >= least
    for key, cell in cells.items():
        assert len(cell["scores"]) == cell["of"] == settings["count"], key
        assert cell["score"] == pytest.approx(sum(cell["scores"]) / cell["of"], abs=1e-5)
        expected = difference_of(cell, cells).get("difference")
        assert expected is None if cell["method"] == "dense" else expected is not None, key
        if expected is not None:
            assert cell["difference"] == pytest.approx(expected, abs=1e-3), key
    _, jobs = repeated(path)
    assert {job.key(task) for job, tasks in jobs.items() for task in tasks} == set(cells)


def test_series_are_the_scores_of_one_length_and_budget():
    settings, cells = load(MEASURED)
    series = plot.series_of(cells, 8192, 0.05)
    assert next(iter(series)) == "full KV" and len(series) >= 7
    assert all(set(scores) == set(settings["tasks"]) for scores in series.values())
    cell = cells["lookahead_hold 0.05 8192 8 max 0 chain"]
    assert series["look-ahead, both rules"]["chain"] == 100 * cell["score"]
    # the same method with another index is a bar of its own
    more = {**cells, "more": {**cell, "index_bits": 4, "score": 0.5}}
    again = plot.series_of(more, 8192, 0.05)
    assert again["look-ahead, both rules, 4-bit, max"] == {"chain": 50.0}
    assert again["look-ahead, both rules, 8-bit, max"] == series["look-ahead, both rules"]
    with pytest.raises(
        UsageError, match=r"--length 8192 --budget 0.3; use one of --length 8192 --budget 0.02"
    ):
        plot.series_of(cells, 8192, 0.3)


def test_some_methods_alone():
    _, cells = load(MEASURED)
    assert list(plot.series_of(cells, 8192, 0.05, ["centre", "own_step0"])) == [
        "full KV",
        "own queries at the boundary",
        "centre query, 1.75 x the rows",
    ]
    for name in ("center", "dense"):
        with pytest.raises(UsageError, match=f"'{name}' is no method to show beside dense; use centre, look"):
            plot.series_of(cells, 8192, 0.05, [name])


def test_a_task_that_was_not_run_is_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A missing score would look like a score of 0; and no two methods have the same colour."""
    from matplotlib.figure import Figure

    settings, cells = load(MEASURED)
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
    )
    fewer = {key: cell for key, cell in cells.items() if (cell["method"], cell["task"]) != ("centre", "json")}
    for number, some in enumerate((cells, fewer)):
        plot.save_plot(some, settings["tasks"], 8192, 0.05, tmp_path / "scores.png")
        axes = figures[-1].axes[0]
        assert sum(text.get_text() == "not run" for text in axes.texts) == number
        colours = [bars[0].get_facecolor() for bars in axes.containers]
        assert len(set(colours)) == len(colours) >= 12


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "new" / "scores.png"
    assert plot.main([str(MEASURED), "--out", str(path), "--length", "16384"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 150_000
    assert capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("report", "out", "said"),
    [
        (str(MEASURED), "/dev/null/scores.png", "cannot be written"),
        (str(MEASURED), "scores.foo", "cannot be written"),
        (str(MEASURED), "", "is a folder; name a .png or .svg file, such as"),
        (str(MEASURED), "scores", "scores does not say of what kind the picture is to be; name a .png"),
        ("", "scores.png", "is a folder; name a JSON file"),
        ("/dev/zero", "scores.png", "/dev/zero is no regular file; name a JSON file"),
        ("none.json", "scores.png", "is no report of this suite"),
        ("x" * 300, "scores.png", "cannot be a report (File name too long)"),
    ],
)
def test_what_cannot_be_drawn(
    report: str, out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert plot.main([str(tmp_path / report), "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(MEASURED), "--out", str(tmp_path / "scores.png")]) == 2
    said = "error: no picture: matplotlib is missing; run: pip install 'herald-dllm[profile]'\n"
    assert capsys.readouterr().err == said


def test_every_method_has_a_label_of_its_own():
    assert set(methods.NAMES) <= set(plot._LABELS) and len(set(plot._LABELS.values())) == len(plot._LABELS)
    _, cells = load(MEASURED)
    one = next(cell for cell in cells.values() if cell["method"] == "lookahead_1" and cell["length"] == 8192)
    later = {"a": {**one, "method": "lookahead_k", "lookahead_step": 5}}
    assert list(plot.series_of(later, 8192, one["budget"])) == ["look-ahead alone, later, step 5"]


def test_the_tasks_that_are_drawn_are_those_of_the_cells():
    """Whatever the settings name: a group, tasks of one run of several, files of one name."""
    _, cells = load(MEASURED)
    tasks = ["needle", "keys", "values", "queries", "chain", "json", "sentence", "pairs"]
    for named in ([], ["ruler"], ["pairs", "gone"]):
        first = [task for task in named if task in tasks]
        rest = [task for task in [*ALL_TASKS, *structured.TASKS] if task not in first]
        assert tasks_of({"tasks": named}, cells) == first + rest
    assert headings(["a/x.jsonl", "b/x.jsonl", "c/y.jsonl", "keys"]) == [
        "a/x.jsonl",
        "b/x.jsonl",
        "y",
        "keys",
    ]


def test_reports_with_other_methods_and_with_none():
    _, cells = load(MEASURED)
    one = next(
        cell for cell in cells.values() if cell["method"] == "lookahead_hold" and cell["length"] == 8192
    )
    gone = {"a": {**one, "method": "an_older_one"}}
    assert list(plot.series_of(gone, 8192, one["budget"])) == ["an_older_one"]
    with pytest.raises(UsageError, match="run methods other than dense into this report"):
        plot.series_of({"a": {**one, "method": "dense"}}, 8192, 0.05)

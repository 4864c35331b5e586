"""Tables and figures against numbers that are worked out by hand."""

import csv
import math
import subprocess
import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest

from tests.helpers import made_up
from xkfac.errors import XkfacError
from xkfac.experiments.report import comparison, drawing, figures, lines, summary, tables
from xkfac.experiments.report.lines import report_runs
from xkfac.experiments.runs.results import JobResult, Spread

ROOT2 = math.sqrt(2)


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def lines_of(*runs):
    return [line for run in report_runs(runs) for line in run.lines]


def by_name(run):
    return {line.name: line for line in lines_of(run)}


def values(run):
    """By line and column, what the summary shows."""
    lines = lines_of(run)
    return {line.name: {column.title: column.value(line) for column in summary.columns(lines)} for line in lines}


# ---------------------------------------------------------------- summary


def test_summary_by_hand():
    line, row = by_name(made_up.small())["kfac"], values(made_up.small())["kfac"]
    # After t tasks the accuracies are 96 + seed - 2 * (t - 1 - i), i = 0 ... t - 1; on average 96 + seed - (t - 1).
    assert (row["after 5"].mean, row["after 10"].mean) == (92.5, 87.5)
    assert row["after 10"].deviation == pytest.approx(1 / ROOT2)
    assert row["forgetting"].mean == row["backward transfer"].mean * -1 == pytest.approx(2 * np.mean(range(1, 10)))
    assert row["forward transfer"].mean == 2.5
    assert row["as learnt"].mean == 96.5
    assert row["s / task"].mean == 2.5
    assert (line.repeats, line.reached, line.notes) == (2, 10, ())


def test_joint_training_has_accuracies_alone():
    row = values(made_up.small())["joint"]
    assert (row["after 5"].mean, row["after 10"].mean) == (98.5, 98.5)
    assert next(title for title, value in row.items() if value is None) == "forgetting"
    assert sum(value is None for value in row.values()) == 4


def test_joint_training_after_every_task_is_not_read_as_a_sequence():
    run = made_up.run(made_up.SMALL.replace("at = [5, 10]", "at = [1, 2]"), [made_up.joint("joint", 0, (1, 2))])
    line = by_name(run)["joint"]
    assert (line.final.mean, line.at_the_end(JobResult.backward_transfer)) == (98, None)


def test_single_repeat_has_no_deviation():
    line = by_name(made_up.single())["xkfac"]
    assert math.isnan(line.final.deviation)
    assert tables.number(line.final) == "91.50"
    assert line.averages[5].count == 1


def test_diverged_repeats_are_named_and_left_out():
    lines = by_name(made_up.diverged())
    assert lines["kfac"].notes == ("diverged at task 7 (1 of 2 repeats)",)
    assert lines["xkfac"].notes == ("diverged at task 4 (1 of 2 repeats)",)
    assert (lines["xkfac"].final.mean, lines["xkfac"].final.count) == (91.5, 1)
    assert (lines["kfac"].averages[5].mean, lines["kfac"].averages[5].count) == (92.5, 2)


def test_joint_training_that_diverged_keeps_what_it_measured():
    jobs = [replace(made_up.joint("joint", 0, (5,)), diverged=1)]
    line = by_name(made_up.run(made_up.SMALL, jobs))["joint"]
    assert (line.averages[5].mean, line.reached) == (98, 5)
    assert line.notes[0].startswith("diverged")


def test_in_progress_is_said():
    lines = by_name(made_up.in_progress())
    assert lines["xkfac"].notes == ("0 to 4 of 10 tasks so far",)
    assert lines["kfac"].notes == lines["joint"].notes == ("not started",)
    assert (lines["xkfac"].reached, lines["xkfac"].final.mean) == (4, 94.5)
    assert values(made_up.in_progress())["xkfac"]["forgetting"].mean == 2
    fewer = made_up.run(made_up.SMALL, [made_up.job("xkfac"), JobResult("xkfac", 1)])
    assert by_name(fewer)["xkfac"].notes == ("1 of 2 repeats so far",)


def test_best_of_a_column():
    lines = lines_of(made_up.small())
    columns = {column.title: column for column in summary.columns(lines)}
    assert list(columns)[:3] == ["after 5", "after 10", "forgetting"]
    assert summary.best(columns["after 10"], lines) == {0}  # not joint training, which has more
    assert summary.best(columns["forgetting"], lines) == {0}  # less is better
    assert summary.best(columns["as learnt"], lines) == set()  # all the same
    lines = lines_of(made_up.diverged())
    assert all(summary.best(column, lines) == set() for column in summary.columns(lines))


def test_summary_as_text_and_csv(tmp_path):
    lines = lines_of(made_up.small())
    heads, rows = summary.summary(lines).texts()
    assert heads[:3] == ["line", "after 5", "after 10"]
    assert rows[0][:3] == ["XK-FAC", "94.50 ± 0.71 *", "92.00 ± 0.71 *"]
    assert rows[0][-1] == "2"  # repeats
    path = tmp_path / "summary.csv"
    path.write_text(summary.summary_csv(lines), encoding="utf-8")
    row = read(path)[1]
    assert (row["label"], float(row["after_10"]), float(row["s_per_task"])) == ("K-FAC", 87.5, 2.5)
    assert float(row["after_10_deviation"]) == pytest.approx(1 / ROOT2)


# ---------------------------------------------------------------- several runs


def test_labels_do_not_collide():
    runs = [made_up.small("a/first"), made_up.small("b/first"), made_up.single()]
    labels = [entry.label for entry in lines_of(*runs)]
    assert len(set(labels)) == len(labels) == 9
    assert labels[0] == "first (1): XK-FAC"
    twice = made_up.run(made_up.SMALL.replace('"K-FAC"', '"XK-FAC"'), [])
    assert [entry.label for entry in lines_of(twice)][:2] == ["XK-FAC (xkfac)", "XK-FAC (kfac)"]


def test_compare_by_hand():
    found = comparison.compare(report_runs([made_up.small("runs/one"), made_up.small("runs/two", shift=0.5)]))
    row = next(row for row in found if row.name == "xkfac")
    assert (row.runs, row.tasks, row.first.mean, row.second.mean, row.difference) == (("one", "two"), 10, 92, 92.5, 0.5)
    # Both have variance 1/2 over two repeats: standard error sqrt(1/4 + 1/4), two degrees of freedom.
    assert row.error == pytest.approx(1 / ROOT2)
    assert row.high - row.difference == pytest.approx(4.302653 / ROOT2, rel=1e-5)
    assert row.difference - row.low == pytest.approx(4.302653 / ROOT2, rel=1e-5)


def test_welch_degrees_of_freedom():
    scipy = pytest.importorskip("scipy.stats")
    one, two = [90.0, 91.0, 93.0], [88.0, 88.5, 89.0, 91.0, 87.0]
    spreads = [Spread(float(np.mean(v)), float(np.std(v, ddof=1)), len(v)) for v in (one, two)]
    expected = scipy.ttest_ind(two, one, equal_var=False).confidence_interval(0.95)
    _, margin = comparison.welch(*spreads)
    difference = spreads[1].mean - spreads[0].mean
    assert (difference - margin, difference + margin) == pytest.approx((expected.low, expected.high))


def test_compare_single_repeats_has_no_interval():
    row = comparison.compare(report_runs([made_up.single(), made_up.single()]))[0]
    assert row.difference == 0
    assert math.isnan(row.error)
    assert math.isnan(row.low)


# ---------------------------------------------------------------- figures


def test_files_hold_the_numbers(tmp_path):
    drawn = {figure.key: figure for figure in figures.draw_all(report_runs([made_up.small()]), tmp_path)}
    assert list(drawn) == ["a", "a-forgetting", "matrices", "training"]
    for figure in drawn.values():
        assert (tmp_path / f"{figure.key}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{figure.key}.svg").read_text(encoding="utf-8")
        assert figure.alt
    rows = [row for row in read(tmp_path / "a.csv") if row["line"] == "xkfac"]
    assert [int(row["tasks"]) for row in rows] == list(range(1, 11))
    assert [float(row["mean"]) for row in rows] == [96.5 - t / 2 for t in range(10)]
    assert {round(float(row["deviation"]), 9) for row in rows} == {round(1 / ROOT2, 9)}
    assert [int(row["tasks"]) for row in read(tmp_path / "a.csv") if row["line"] == "joint"] == [5, 10]
    forgetting = [float(row["mean"]) for row in read(tmp_path / "a-forgetting.csv") if row["line"] == "kfac"]
    assert forgetting == pytest.approx([t + 1 for t in range(1, 10)])
    cell = next(
        r for r in read(tmp_path / "matrices.csv") if (r["line"], r["after_task"], r["task"]) == ("kfac", "4", "2")
    )
    assert (float(cell["mean"]), cell["repeats"]) == (96.5 - 2 * 2, "2")
    epoch = next(r for r in read(tmp_path / "training.csv") if (r["line"], r["task"], r["epoch"]) == ("kfac", "3", "2"))
    assert float(epoch["loss_mean"]) == pytest.approx(0.25 + 0.01)
    assert float(epoch["penalty_mean"]) == pytest.approx(0.04)


def test_figures_name_every_line(tmp_path, monkeypatch):
    run = made_up.large(repeats=2, tasks=3, epochs=2)
    drawn_training = drawing.Plot("training", "", "", "", (), ())
    monkeypatch.setattr(figures, "draw_training", lambda *_: drawn_training)  # a panel per line, as the matrices
    drawn = {figure.key: figure for figure in figures.draw_all(report_runs([run]), tmp_path)}
    for key, figure in run.recipe.figures.items():
        svg = (tmp_path / f"{key}.svg").read_text(encoding="utf-8")
        labels = [run.recipe.lines[name].label for name in figure.lines]
        assert {row[1] for row in drawn[key].rows} == set(labels)
        for label in labels:
            assert label in svg
            assert label in drawn[key].element
    assert sum(line.label in drawn["matrices"].element for line in run.recipe.lines.values()) == 24


def test_lines_that_no_figure_shows_have_their_own(tmp_path):
    text = made_up.SMALL.replace('lines = ["xkfac", "kfac", "joint"]', 'lines = ["kfac"]')
    run = made_up.run(text, [made_up.job("xkfac"), made_up.job("kfac")])
    drawn = figures.draw_all(report_runs([run]), tmp_path)
    assert [figure.key for figure in drawn][:2] == ["a", "other-lines"]
    other = next(figure for figure in drawn if figure.title == "Other lines")
    assert "XK-FAC  91.50" in other.element
    assert "joint training  –" in other.element  # noqa: RUF001


def drawn_curve(name, run):
    axes = drawing.mpl.figure.Figure().add_subplot()
    entry = next(entry for entry in lines_of(run) if entry.name == name)
    curve = entry.curve(JobResult.average_accuracy)
    figures._draw_curve(axes, entry, curve, drawing.style_of(entry.index, entry.hue, entry.line), 10)
    return axes


def test_bands_are_mean_and_deviation():
    axes = drawn_curve("xkfac", made_up.small())
    line, band = axes.lines[0], axes.collections[0]
    assert line.get_ydata() == pytest.approx([96.5 - t / 2 for t in range(10)])
    edge = band.get_paths()[0].vertices
    at_five = sorted({round(float(y), 6) for x, y in edge if x == 5})
    assert at_five == pytest.approx([94.5 - 1 / ROOT2, 94.5 + 1 / ROOT2], abs=1e-5)
    assert line.get_linestyle() == "-"
    assert drawn_curve("kfac", made_up.small()).lines[0].get_linestyle() == "--"


def test_single_repeat_has_no_band():
    assert len(drawn_curve("xkfac", made_up.single()).collections) == 0


def test_a_diverged_line_ends_with_a_cross():
    jobs = [made_up.job("kfac", seed, diverged=6) for seed in (0, 1)]
    axes = drawn_curve("kfac", made_up.run(made_up.SMALL, jobs))
    line, cross = axes.lines
    assert cross.get_marker() == "x"
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (line.get_xdata()[-1], line.get_ydata()[-1])
    assert line.get_xdata()[-1] == 6


def test_joint_training_at_one_number_of_tasks_is_a_level():
    axes = drawn_curve("joint", made_up.single())
    assert any(list(line.get_ydata()) == [98, 98] for line in axes.lines)


def test_styles_of_25_lines_differ():
    run = made_up.large(repeats=1, tasks=2, epochs=1)
    looks = [drawing.style_of(entry.index, entry.hue, entry.line) for entry in lines_of(run)]
    assert len({(style["color"], style["marker"]) for style in looks}) == 25


def test_lines_of_one_figure_have_colours_of_their_own():
    assert len(drawing.PALETTE) == lines.HUES
    text = made_up.SMALL + "".join(f'[lines.more-{i}]\nmethod = "kfac"\n' for i in range(12))
    few = [f"more-{i}" for i in (0, 3, 7, 11)]
    run = made_up.run(text + f"[figures.few]\nlines = {[*few, 'xkfac', 'kfac', 'joint']}\n", [made_up.job("xkfac")])
    looks = {e.name: drawing.style_of(e.index, e.hue, e.line)["color"] for e in lines_of(run)}
    assert len({looks[name] for name in (*few, "xkfac", "kfac", "joint")}) == 7


def test_the_better_lines_are_enlarged_where_one_falls_far_below():
    def curves(*ends):
        return [[(1, Spread(97.0, 0.1, 2)), (2, Spread(end, 0.1, 2))] for end in ends]

    low, high = figures._zoom(curves(96, 95, 94, 20), 1)
    assert 93 < low < 95
    assert 97 < high < 98
    assert figures._zoom(curves(96, 95, 94, 93), 1) is None
    assert figures._zoom(curves(96, 20), 1) is None


def test_ticks():
    assert drawing.whole_ticks(1, 8) == [1]
    assert drawing.whole_ticks(5, 8) == [1, 2, 3, 4, 5]
    assert drawing.whole_ticks(50, 8) == [1, 10, 20, 30, 40, 50]
    assert drawing.whole_ticks(23, 5) == [1, 5, 10, 15, 23]


def test_nothing_is_left_behind_in_matplotlib(tmp_path):
    before = dict(mpl.rcParams)
    figures.draw_all(report_runs([made_up.single()]), tmp_path)
    assert dict(mpl.rcParams) == before
    code = "import sys, xkfac.experiments.report; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(XkfacError, match="could not be written"):
        figures.draw_all(report_runs([made_up.single()]), tmp_path / "file" / "figures")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page"
    drawing.write_file(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(XkfacError, match="No space left on device"):
        drawing.write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["page"]

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
from xkfac.experiments.report import comparison, drawing, figures, multiples, styles, tables
from xkfac.experiments.report.drawing import Drawn
from xkfac.experiments.runs.results import JobResult, Spread

ROOT2 = math.sqrt(2)


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_name(rows):
    return {row.entry.name: row for row in rows}


# ---------------------------------------------------------------- summary


def test_summary_by_hand():
    row = by_name(tables.summary([made_up.small()]))["kfac"]
    # After t tasks the accuracies are 96 + seed - 2 * (t - 1 - i), i = 0 ... t - 1; on average 96 + seed - (t - 1).
    assert {count: value.mean for count, value in row.at.items()} == {5: 92.5, 10: 87.5}
    assert row.final.mean == 87.5
    assert row.final.deviation == pytest.approx(1 / ROOT2)
    assert row.forgetting.mean == row.backward_transfer.mean * -1 == pytest.approx(2 * np.mean(range(1, 10)))
    assert row.forward_transfer.mean == 2.5
    assert row.learning_accuracy.mean == 96.5
    assert row.seconds.mean == 2.5
    assert (row.repeats, row.tasks, row.reached, row.notes) == (2, 10, 10, ())


def test_joint_training_has_accuracies_alone():
    row = by_name(tables.summary([made_up.small()]))["joint"]
    assert (row.final.mean, row.at[5].mean, row.reached) == (98.5, 98.5, 10)
    assert (row.forgetting, row.backward_transfer, row.forward_transfer, row.learning_accuracy) == (None,) * 4


def test_joint_training_after_every_task_is_not_read_as_a_sequence():
    run = made_up.run(made_up.SMALL.replace("at = [5, 10]", "at = [1, 2]"), [made_up.joint("joint", 0, (1, 2))])
    row = by_name(tables.summary([run]))["joint"]
    assert (row.final.mean, row.forgetting, row.backward_transfer) == (98, None, None)


def test_single_repeat_has_no_deviation():
    row = by_name(tables.summary([made_up.single()]))["xkfac"]
    assert math.isnan(row.final.deviation)
    assert tables.number(row.final) == "91.50"
    assert row.at[5].count == 1


def test_diverged_repeats_are_named_and_left_out():
    rows = by_name(tables.summary([made_up.diverged()]))
    assert rows["kfac"].notes == ("diverged at task 7 (1 of 2 repeats)",)
    assert rows["xkfac"].notes == ("diverged at task 4 (1 of 2 repeats)",)  # NaN alone, without the flag
    assert (rows["xkfac"].final.mean, rows["xkfac"].final.count) == (91.5, 1)
    assert (rows["kfac"].at[5].mean, rows["kfac"].at[5].count) == (92.5, 2)
    assert all(math.isfinite(rows[name].forgetting.mean) for name in ("xkfac", "kfac"))


def test_chance_accuracies_after_divergence_do_not_count():
    job = replace(made_up.job("kfac", 0, 10), diverged=4)
    assert len(tables.finite_part(job).accuracy) == 4
    assert len(tables.finite_part(job).before) == 4


def test_joint_training_that_diverged_keeps_what_it_measured():
    jobs = [replace(made_up.joint("joint", 0, (5,)), diverged=1)]
    row = by_name(tables.summary([made_up.run(made_up.SMALL, jobs)]))["joint"]
    assert (row.at[5].mean, row.reached) == (98, 5)
    assert row.notes[0].startswith("diverged")


def test_in_progress_is_said():
    rows = by_name(tables.summary([made_up.in_progress()]))
    assert rows["xkfac"].notes == ("0 to 4 of 10 tasks so far",)
    assert rows["kfac"].notes == rows["joint"].notes == ("not started",)
    assert (rows["xkfac"].reached, rows["xkfac"].final.mean, rows["xkfac"].forgetting.mean) == (4, 94.5, 2)
    fewer = made_up.run(made_up.SMALL, [made_up.job("xkfac"), JobResult("xkfac", 1)])
    assert by_name(tables.summary([fewer]))["xkfac"].notes == ("1 of 2 repeats so far",)


def test_best_of_a_column():
    rows = tables.summary([made_up.small()])
    columns = {column.title: column for column in tables.columns(rows)}
    assert list(columns)[:3] == ["after 5", "after 10", "forgetting"]
    assert tables.best(columns["after 10"], rows) == {0}  # not joint training, which has more
    assert tables.best(columns["forgetting"], rows) == {0}  # less is better
    assert tables.best(columns["as learnt"], rows) == set()  # all the same
    rows = tables.summary([made_up.diverged()])
    assert all(tables.best(column, rows) == set() for column in tables.columns(rows))


def test_summary_as_text_and_csv(tmp_path):
    text = tables.summary_text([made_up.small()])
    assert text[0][:3] == ["line", "after 5", "after 10"]
    assert text[1][:3] == ["XK-FAC", "94.50 ± 0.71 *", "92.00 ± 0.71 *"]
    path = tmp_path / "summary.csv"
    path.write_text(tables.summary_csv(tables.summary([made_up.small()])), encoding="utf-8")
    row = read(path)[1]
    assert (row["label"], float(row["after_10"]), float(row["s_per_task"])) == ("K-FAC", 87.5, 2.5)
    assert float(row["after_10_deviation"]) == pytest.approx(1 / ROOT2)


# ---------------------------------------------------------------- several runs


def test_labels_do_not_collide():
    runs = [made_up.small("a/first"), made_up.small("b/first"), made_up.single()]
    labels = [entry.label for entry in tables.entries(runs)]
    assert len(set(labels)) == len(labels) == 9
    assert labels[0] == "first (1): XK-FAC"
    twice = made_up.run(made_up.SMALL.replace('"K-FAC"', '"XK-FAC"'), [])
    assert [entry.label for entry in tables.entries([twice])][:2] == ["XK-FAC (xkfac)", "XK-FAC (kfac)"]


def test_compare_by_hand():
    found = comparison.compare([made_up.small("runs/one"), made_up.small("runs/two", shift=0.5)])
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
    row = comparison.compare([made_up.single(), made_up.single()])[0]
    assert row.difference == 0
    assert math.isnan(row.error)
    assert math.isnan(row.low)


# ---------------------------------------------------------------- figures


def test_files_hold_the_numbers(tmp_path):
    drawn = {figure.key: figure for figure in figures.draw_all([made_up.small()], tmp_path)}
    assert list(drawn) == ["a", "a-forgetting", "matrices", "training"]
    for figure in drawn.values():
        assert figure.png.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in figure.svg.read_text(encoding="utf-8")
        assert figure.alt
    rows = [row for row in read(drawn["a"].csv) if row["line"] == "xkfac"]
    assert [int(row["tasks"]) for row in rows] == list(range(1, 11))
    assert [float(row["mean"]) for row in rows] == [96.5 - t / 2 for t in range(10)]
    assert {round(float(row["deviation"]), 9) for row in rows} == {round(1 / ROOT2, 9)}
    assert [int(row["tasks"]) for row in read(drawn["a"].csv) if row["line"] == "joint"] == [5, 10]
    forgetting = [float(row["mean"]) for row in read(drawn["a-forgetting"].csv) if row["line"] == "kfac"]
    assert forgetting == pytest.approx([t + 1 for t in range(1, 10)])
    cell = next(r for r in read(drawn["matrices"].csv) if (r["line"], r["after_task"], r["task"]) == ("kfac", "4", "2"))
    assert (float(cell["mean"]), cell["repeats"]) == (96.5 - 2 * 2, "2")
    epoch = next(r for r in read(drawn["training"].csv) if (r["line"], r["task"], r["epoch"]) == ("kfac", "3", "2"))
    assert float(epoch["loss_mean"]) == pytest.approx(0.25 + 0.01)
    assert float(epoch["penalty_mean"]) == pytest.approx(0.04)


def test_figures_name_every_line(tmp_path, monkeypatch):
    run = made_up.large(repeats=2, tasks=3, epochs=2)
    drawn_training = Drawn("training", "", "", tmp_path, tmp_path, tmp_path, "")
    monkeypatch.setattr(figures, "draw_training", lambda *_: drawn_training)  # a panel per line, as the matrices
    drawn = figures.draw_all([run], tmp_path)
    for key, figure in run.recipe.figures.items():
        found = next(d for d in drawn if d.key == key)
        svg = found.svg.read_text(encoding="utf-8")
        labels = [run.recipe.lines[name].label for name in figure.lines]
        assert sorted(item.label for item in found.legend) == sorted(labels)
        assert all(label in svg for label in labels)
        assert all(label in found.panels[0].wide for label in labels)
    assert len(next(d for d in drawn if d.key == "matrices").panels) == 24


def test_lines_that_no_figure_shows_have_their_own(tmp_path):
    text = made_up.SMALL.replace('lines = ["xkfac", "kfac", "joint"]', 'lines = ["kfac"]')
    run = made_up.run(text, [made_up.job("xkfac"), made_up.job("kfac")])
    drawn = figures.draw_all([run], tmp_path)
    names = figures.figure_names([run])
    assert [figure.key for figure in drawn][: len(names)] == names
    other = next(figure for figure in drawn if figure.title == "Other lines")
    assert [key.label for key in other.legend] == ["XK-FAC", "joint training"]


def drawn_curve(name, run):
    axes = styles.mpl.figure.Figure().add_subplot()
    entry = next(entry for entry in tables.entries([run]) if entry.name == name)
    curve = entry.curve(JobResult.average_accuracy)
    figures._draw_curve(axes, entry, curve, styles.style_of(entry.index, entry.hue, entry.line), 10)
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
    looks = [styles.style_of(entry.index, entry.hue, entry.line) for entry in tables.entries([run])]
    assert len({(style.colour, style.marker) for style in looks}) == 25


def test_lines_of_one_figure_have_colours_of_their_own():
    assert len(styles.PALETTE) == tables.HUES
    text = made_up.SMALL + "".join(f'[lines.more-{i}]\nmethod = "kfac"\n' for i in range(12))
    few = [f"more-{i}" for i in (0, 3, 7, 11)]
    run = made_up.run(text + f"[figures.few]\nlines = {[*few, 'xkfac', 'kfac', 'joint']}\n", [made_up.job("xkfac")])
    looks = {e.name: styles.style_of(e.index, e.hue, e.line).colour for e in tables.entries([run])}
    assert len({looks[name] for name in (*few, "xkfac", "kfac", "joint")}) == 7


def test_the_better_lines_are_enlarged_where_one_falls_far_below():
    def curves(*ends):
        entry = tables.entries([made_up.small()])[0]
        return [(entry, [(1, Spread(97.0, 0.1, 2)), (2, Spread(end, 0.1, 2))]) for end in ends]

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
    assert [multiples._power(value) for value in (1e-4, 0.01, 1.0, 100.0, 1e5)] == ["10⁻⁴", "0.01", "1", "100", "10⁵"]


def test_nothing_is_left_behind_in_matplotlib(tmp_path):
    before = dict(mpl.rcParams)
    figures.draw_all([made_up.single()], tmp_path)
    assert dict(mpl.rcParams) == before
    code = "import sys, xkfac.experiments.report; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(XkfacError, match="could not be written"):
        figures.draw_all([made_up.single()], tmp_path / "file" / "figures")


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

# ruff: noqa: RUF001, the letters and dashes that readers of the paper expect
"""The scatter of target and average accuracy, with made-up settings."""

import csv
import random
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex
from scipy.stats import spearmanr

from xkfac.experiments.report import drawing, scatter
from xkfac.experiments.report.scatter import draw_scatter, rank_correlation
from xkfac.experiments.tuning.trials import Point

LRS, DAMPINGS = (0.1, 0.05, 0.02), (1e-4, 1e-5)


def made_up(tasks=("Birds", "Cars"), labels=("K-FAC", "XK-FAC"), balances=(True, False)):
    """Settings of which better ones on the target are better on average with alpha, and worse without."""
    points = []
    for task in tasks:
        for hue, label in enumerate(labels):
            for balanced in balances:
                for place, (lr, damping) in enumerate((lr, d) for lr in LRS for d in DAMPINGS):
                    target = 70.0 + 2 * place + hue
                    average = 60.0 + (place if balanced else -place) + hue
                    points.append(Point(task, label, balanced, lr, damping, target, average, place == 5))
    return points


def point(target, average, **changes):
    fields = {"task": "t", "label": "m", "balanced": True, "lr": 0.1, "damping": 1e-4, "chosen": False}
    return Point(**{**fields, "target": target, "average": average, **changes})


def drawn_axes(points, tmp_path, monkeypatch):
    """Return the figure and the axes of the figure's file by their titles, as they were drawn."""
    kept = []
    saved = scatter.multiples.__globals__["save"]
    monkeypatch.setitem(
        scatter.multiples.__globals__, "save", lambda canvas, *rest: kept.append(canvas) or saved(canvas, *rest)
    )
    drawn = draw_scatter("scatter", points, tmp_path)
    return drawn, {axes.get_title(loc="left"): axes for axes in kept[0].axes}


# ---------------------------------------------------------------- rank correlation


def test_rank_correlation_by_hand():
    assert rank_correlation([point(x, x**3) for x in (1.0, 2.0, 5.0)]) == pytest.approx(1)
    assert rank_correlation([point(x, -x) for x in (1.0, 2.0, 5.0)]) == pytest.approx(-1)
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15)
    assert rank_correlation([point(x, y) for x, y in ((1, 2), (2, 1), (3, 4), (4, 3))]) == pytest.approx(0.6)
    assert rank_correlation([point(1, 1), point(2, 2)]) is None
    assert rank_correlation([point(1, x) for x in (1.0, 2.0, 3.0)]) is None
    lost = [point(None, None)]
    assert rank_correlation([point(1, 1), point(2, 2), *lost]) is None
    assert rank_correlation([*(point(x, x) for x in (1.0, 2.0, 3.0)), *lost]) == pytest.approx(1)


def test_rank_correlation_with_equal_accuracies_is_that_of_scipy():
    source = random.Random(0)
    for _ in range(30):
        pairs = [(source.randrange(5), source.randrange(5)) for _ in range(12)]
        assert rank_correlation([point(x, y) for x, y in pairs]) == pytest.approx(spearmanr(pairs).statistic)


# ---------------------------------------------------------------- figure


def test_each_panel_shows_the_points_of_its_task_and_row(tmp_path, monkeypatch):
    points = made_up()
    _, axes = drawn_axes(points, tmp_path, monkeypatch)
    assert list(axes) == ["Birds, with α", "Cars, with α", "Birds, without α", "Cars, without α"]
    rows = [axes[title].get_position().y0 for title in axes]
    assert rows == pytest.approx([rows[0]] * 2 + [rows[2]] * 2)
    assert rows[0] > rows[2] + 0.2
    for title, panel in axes.items():
        task, balanced = title.split(",")[0], "without" not in title
        lines = panel.get_lines()
        for hue, label in enumerate(("K-FAC", "XK-FAC")):
            shown = [(p.target, p.average) for p in points if (p.task, p.label, p.balanced) == (task, label, balanced)]
            assert sorted(zip(*lines[hue].get_data(), strict=True)) == sorted(shown)
            assert (to_hex(lines[hue].get_color()), lines[hue].get_marker()) == (
                drawing.PALETTE[hue],
                drawing.MARKERS[hue],
            )
            assert lines[hue].get_linestyle() == "None"
        chosen = [(p.target, p.average) for p in points if (p.task, p.balanced, p.chosen) == (task, balanced, True)]
        assert sorted(zip(*lines[2].get_data(), strict=True)) == sorted(chosen)
        assert len(chosen) == 2
        assert (lines[2].get_markerfacecolor(), to_hex(lines[2].get_color())) == ("none", drawing.INK)
        assert lines[2].get_markersize() > 1.5 * lines[0].get_markersize()
        written = [text.get_text() for text in panel.texts]
        sign = "" if balanced else "−"
        assert written[1:] == [f"K-FAC ρ = {sign}1.00", f"XK-FAC ρ = {sign}1.00"]
        every = rank_correlation([p for p in points if (p.task, p.balanced) == (task, balanced)])
        assert written[0] == f"all ρ = {every:.2f}".replace("-", "−")
    assert axes["Cars, with α"].get_xlim() == axes["Cars, without α"].get_xlim()
    assert axes["Cars, with α"].get_ylim() == axes["Cars, without α"].get_ylim()


def test_the_files_have_every_point_and_the_page_its_own_colours(tmp_path):
    points = [*made_up(), point(None, None, task="Cars", label="K-FAC", chosen=True)]
    drawn = draw_scatter("some-key", points, tmp_path / "figures")
    with (tmp_path / "figures" / "some-key.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(points)
    assert [float(row["target"]) for row in rows[:-1]] == [p.target for p in points[:-1]]
    assert rows[0] == {
        "task": "Birds",
        "label": "K-FAC",
        "balanced": "True",
        "lr": "0.1",
        "damping": "0.0001",
        "target": "70.0",
        "average": "60.0",
        "chosen": "False",
    }
    assert (rows[-1]["target"], rows[-1]["average"]) == ("", "")
    assert "1 of 49 settings diverged" in drawn.note
    assert "diverged" not in scatter._note(made_up())
    files = {kind: tmp_path / "figures" / f"some-key.{kind}" for kind in ("png", "svg")}
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(files["svg"]).getroot().tag.endswith("svg")
    for variable in ("--hue-0", "--hue-1", "--ink", "--soft", "--paper"):
        assert f"var({variable})" in drawn.element
    assert all(hue not in drawn.element for hue in (*drawing.PALETTE, drawing.INK, drawing.SOFT, drawing.GRID))
    assert ElementTree.fromstring(drawn.element).attrib["aria-label"] == drawn.alt
    assert "Birds, without α: 12 settings, rank correlation -0." in drawn.alt


def test_the_same_points_give_the_same_bytes_and_settings_of_matplotlib_stay(tmp_path):
    before = dict(mpl.rcParams)
    one, two = (draw_scatter("key", made_up(("Birds",)), tmp_path / name) for name in ("one", "two"))
    assert one == two
    for kind in ("png", "svg", "csv"):
        assert (tmp_path / "one" / f"key.{kind}").read_bytes() == (tmp_path / "two" / f"key.{kind}").read_bytes()
    assert dict(mpl.rcParams) == before


def test_one_row_where_alpha_was_never_or_always_adapted_and_a_word_where_there_is_nothing(tmp_path, monkeypatch):
    points = made_up(("Birds",), balances=(False,))
    assert list(drawn_axes(points, tmp_path, monkeypatch)[1]) == ["Birds, without α"]
    points += made_up(("Cars",), balances=(True,))
    drawn, axes = drawn_axes(points, tmp_path, monkeypatch)
    assert list(axes) == ["Birds, with α", "Cars, with α", "Birds, without α", "Cars, without α"]
    assert [text.get_text() for text in axes["Birds, with α"].texts] == ["no results"]
    assert "Birds, with α: no results." in drawn.alt

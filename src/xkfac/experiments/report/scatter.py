"""Target accuracy against average accuracy, one point per setting of hyperparameters (app:res of the paper).

Hyperparameters are chosen by what a target task shows, without source data. That works as far as settings that are
better on the target are better on all tasks: as far as the two accuracies rank settings alike.
"""

import itertools
from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from xkfac.errors import shortened
from xkfac.experiments.report.drawing import INK, MARKERS, PALETTE, SOFT, Limits, Plot, Style, filled, multiples
from xkfac.experiments.report.tables import decimal, printable
from xkfac.experiments.tuning.trials import Point

SCATTER = "Accuracy on the target against the average over tasks so far"
_SIZE = (260, 230)
_ROWS = {True: "with α", False: "without α"}  # noqa: RUF001, the paper's letter
_RING: Style = {**filled(INK, "o", 12), "linestyle": "none", "markerfacecolor": "none", "markeredgewidth": 1.4}


def rank_correlation(points: Sequence[Point]) -> float | None:
    """Return Spearman's correlation of target and average accuracy, equal accuracies sharing their mean rank.

    None for fewer than three settings that did not diverge, or where one of the two is the same for all.
    """
    pairs = [(point.target, point.average) for point in points if point.target is not None]
    if len(pairs) < 3 or any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(pairs).statistic)


def draw_scatter(key: str, points: Sequence[Point], folder: Path, title: str = SCATTER) -> Plot:
    """Draw target against average accuracy, a column per task, with alpha in the top row and without in the bottom row.

    Both panels of a column have the same axes. Settings that diverged are in the CSV file, and counted in the note.
    """
    measured = [point for point in points if point.target is not None]
    tasks = list(dict.fromkeys(point.task for point in points))
    rows = [row for row in _ROWS if any(point.balanced is row for point in points)]
    labels = dict.fromkeys(point.label for point in points)
    looks = zip(itertools.cycle(PALETTE), itertools.cycle(MARKERS), strict=False)
    styles = {label: filled(*look) | {"linestyle": "none"} for label, look in zip(labels, looks, strict=False)}
    shown: dict[str, list[Point]] = {}
    panels = {}
    for row, task in itertools.product(rows, tasks):
        name, of_task = printable(f"{task}, {_ROWS[row]}"), [point for point in measured if point.task == task]
        shown[name] = [point for point in of_task if point.balanced is row]
        panels[name] = partial(_draw_panel, points=shown[name], styles=styles, limits=_limits(of_task))

    def finish(canvas: Canvas) -> None:
        looks = {printable(label): style for label, style in styles.items()} | {"chosen": _RING}
        handles = [Line2D([], [], label=shortened(label, 60), **style) for label, style in looks.items()]
        canvas.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 5))

    alt = f"{title}. " + " ".join(f"{name}: {_said(some)}." for name, some in shown.items())
    header = [field.name for field in fields(Point)]
    plot = Plot(key, title, _note(points), alt, header, [astuple(point) for point in points])
    return multiples(plot, panels, _SIZE, len(tasks), folder, finish)


def _limits(points: Sequence[Point]) -> Limits:
    """Return the ranges of both axes over the panels of a task, with room for markers and for what is written."""
    ranges = {}
    for axis, name, above in (("xlim", "target", 0.08), ("ylim", "average", 0.3)):
        values = [getattr(point, name) for point in points] or [0.0, 100.0]
        length = max(max(values) - min(values), 1.0)
        ranges[axis] = (min(values) - 0.08 * length, max(values) + above * length)
    return ranges


def _draw_panel(axes: Axes, *, points: Sequence[Any], styles: dict[str, Style], limits: Limits) -> None:
    shown = [([p for p in points if p.label == label], {"alpha": 0.85, **style}) for label, style in styles.items()]
    for of, style in (*shown, ([p for p in points if p.chosen], {"zorder": 4, **_RING})):
        axes.plot([p.target for p in of], [p.average for p in of], **style)
    _write_correlations(axes, points, styles)
    axes.set_xlabel("accuracy on the task (%)", labelpad=2)
    axes.set_ylabel("average accuracy (%)", labelpad=2)
    axes.set(**limits)
    axes.grid(axis="both")


def _write_correlations(axes: Axes, points: Sequence[Point], styles: dict[str, Style]) -> None:
    """Write the rank correlation over all methods of a panel, then that of each if there are several."""
    by_label = {label: [p for p in points if p.label == label] for label in styles}
    several = sum(map(bool, by_label.values())) > 1
    texts = [(f"{'all ' if several else ''}ρ = {decimal(rank_correlation(points))}", INK)]  # noqa: RUF001
    texts += [
        (f"{shortened(printable(label), 24)} ρ = {decimal(value)}", styles[label]["color"])  # noqa: RUF001
        for label, some in by_label.items()
        if several and (value := rank_correlation(some)) is not None
    ]
    for place, (text, colour) in enumerate(texts if points else [("no results", SOFT)]):
        where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset fontsize", "va": "top"}
        axes.annotate(text, (0.03, 0.97), (0, -1.25 * place), color=colour, **where)


def _said(points: Sequence[Point]) -> str:
    value = rank_correlation(points)
    said = "unknown" if value is None else f"{value:.2f}"
    return f"{len(points)} settings, rank correlation {said}" if points else "no results"


def _note(points: Sequence[Point]) -> str:
    note = (
        "Each point is one setting of learning rate and damping; rings are the settings that were chosen. ρ is "  # noqa: RUF001
        "Spearman's rank correlation of the two accuracies: near 1, what is best on the target is best on average."
    )
    lost = sum(point.target is None for point in points)
    return note + (f" {lost} of {len(points)} settings diverged and are not shown." if lost else "")

"""Target accuracy against average accuracy, one point a setting of hyperparameters (app:res of the paper).

Hyperparameters are chosen by what a target task shows, without source data. That works as far as settings that are
better on the target are better on all tasks: as far as the two accuracies rank settings alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from xkfac.errors import XkfacError
from xkfac.experiments.report.drawing import Plot, multiples, shortened
from xkfac.experiments.report.styles import INK, MARKERS, PALETTE, SOFT, Style
from xkfac.experiments.report.tables import NOTHING, printable
from xkfac.experiments.tuning.trials import Point

SCATTER = "Accuracy on the target against the average over tasks so far"
_SIZE = (260, 230)
_ROWS = {True: "with α", False: "without α"}  # noqa: RUF001, the paper's letter
_RING: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": "o", "markersize": 12, "markerfacecolor": "none"}


@dataclass(frozen=True)
class Correlation:
    """The rank correlation of target and average accuracy in one panel; over all methods where `label` is empty."""

    task: str
    balanced: bool
    label: str
    value: float | None
    count: int


def rank_correlation(points: Sequence[Point]) -> float | None:
    """Return Spearman's correlation of target and average accuracy, equal accuracies sharing their mean rank.

    None for fewer than three settings that did not diverge, or where one of the two is the same for all.
    """
    there = [point for point in points if point.target is not None]
    if len(there) < 3:
        return None
    pairs = [(point.target, point.average) for point in there]
    if any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(pairs).statistic)


def correlations(points: Sequence[Point]) -> list[Correlation]:
    """Return the rank correlations of every panel: over all its methods, then of each if there are several."""
    found = []
    for balanced, task in _places(points):
        shown = [point for point in points if (point.balanced, point.task) == (balanced, task)]
        labels = list(dict.fromkeys(point.label for point in shown))
        for label in ("", *(labels if len(labels) > 1 else ())):
            some = [point for point in shown if label in ("", point.label)]
            count = sum(point.target is not None for point in some)
            found.append(Correlation(task, balanced, label, rank_correlation(some), count))
    return found


def _places(points: Sequence[Point]) -> list[tuple[bool, str]]:
    """Return the panels in the order in which they are read: tasks from left to right, with alpha above."""
    tasks = dict.fromkeys(point.task for point in points)
    return [(balanced, task) for balanced in _ROWS if any(p.balanced is balanced for p in points) for task in tasks]


def draw_scatter(key: str, points: Sequence[Point], folder: Path, title: str = SCATTER) -> Plot:
    """Draw target against average accuracy, a column a task, with alpha in the top row and without in the bottom row.

    Both panels of a column have the same axes. Settings that diverged are in the CSV file, and counted in the note.

    Raises XkfacError when there are no points, or the folder cannot be written.
    """
    if not any(point.target is not None for point in points):
        raise XkfacError("no setting of hyperparameters has accuracies yet; draw the scatter once some are measured")
    places = _places(points)
    styles = _styles(points)
    found = correlations(points)
    limits = {task: _limits([p for p in points if p.task == task and p.target is not None]) for _, task in places}

    def fill(axes: Axes, position: int) -> None:
        balanced, task = places[position]
        shown = [point for point in points if (point.balanced, point.task) == (balanced, task)]
        _draw_points(axes, shown, styles)
        said = [each for each in found if (each.balanced, each.task) == (balanced, task)]
        _draw_correlations(axes, said, styles)
        axes.set_xlabel("accuracy on the task (%)", labelpad=2)
        axes.set_ylabel("average accuracy (%)", labelpad=2)
        axes.set_xlim(*limits[task][0])
        axes.set_ylim(*limits[task][1])
        axes.grid(axis="both")

    labels = [printable(f"{task}, {_ROWS[balanced]}") for balanced, task in places]
    alts = [_alt(label, place, found) for label, place in zip(labels, places, strict=True)]
    header = [field.name for field in fields(Point)]
    alt = f"{title}. " + " ".join(alts)
    plot = Plot(key, title, _note(points), alt, header, [astuple(point) for point in points])
    return multiples(plot, labels, fill, _SIZE, len(limits), folder, lambda canvas: _legend(canvas, styles))


def _styles(points: Sequence[Point]) -> dict[str, Style]:
    """Return colour and marker of each method, in the order in which they come."""
    labels = dict.fromkeys(point.label for point in points)
    return {
        label: Style(PALETTE[i % len(PALETTE)], (), MARKERS[i % len(MARKERS)], 6.0) for i, label in enumerate(labels)
    }


def _limits(points: Sequence[Point]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of both axes over the panels of a task, with room for markers and for what is written."""
    ranges = []
    for name, above in (("target", 0.08), ("average", 0.3)):
        values = [getattr(point, name) for point in points] or [0.0, 100.0]
        length = max(max(values) - min(values), 1.0)
        ranges.append((min(values) - 0.08 * length, max(values) + above * length))
    return ranges[0], ranges[1]


def _draw_points(axes: Axes, points: Sequence[Point], styles: dict[str, Style]) -> None:
    for label, style in styles.items():
        some = [point for point in points if point.label == label and point.target is not None]
        look = {**style.plot, "linestyle": "none"}
        axes.plot([p.target for p in some], [p.average for p in some], alpha=0.85, **look)
    chosen = [point for point in points if point.chosen and point.target is not None]
    axes.plot([p.target for p in chosen], [p.average for p in chosen], markeredgewidth=1.4, zorder=4, **_RING)


def _draw_correlations(axes: Axes, found: Sequence[Correlation], styles: dict[str, Style]) -> None:
    shown = [each for each in found if each.value is not None or not each.label]  # two points have no correlation
    for place, each in enumerate(shown):
        colour = styles[each.label].colour if each.label else INK if each.count else SOFT
        name = each.label or ("all" if len(found) > 1 else "")
        text = f"{shortened(printable(name), 24)} " if name and each.count else ""
        text += f"ρ = {_rounded(each.value)}" if each.count else "no results"  # noqa: RUF001
        axes.annotate(
            text,
            (0.03, 0.97),
            (0, -1.25 * place),
            xycoords="axes fraction",
            textcoords="offset fontsize",
            va="top",
            color=colour,
        )


def _rounded(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}".replace("-", "−")  # noqa: RUF001


def _legend(canvas: Canvas, styles: dict[str, Style]) -> None:
    handles = [
        Line2D([], [], label=shortened(printable(label)), **{**style.plot, "linestyle": "none"})
        for label, style in styles.items()
    ]
    ring = Line2D([], [], label="chosen", markeredgewidth=1.4, **_RING)
    canvas.legend(handles=[*handles, ring], loc="outside lower left", ncols=min(len(handles) + 1, 5))


def _alt(label: str, place: tuple[bool, str], found: Sequence[Correlation]) -> str:
    every = next(each for each in found if (each.balanced, each.task) == place and not each.label)
    if not every.count:
        return f"{label}: no results."
    said = "unknown" if every.value is None else f"{every.value:.2f}"
    return f"{label}: {every.count} settings, rank correlation {said}."


def _note(points: Sequence[Point]) -> str:
    note = (
        "Each point is one setting of learning rate and damping; rings are the settings that were chosen. ρ is "  # noqa: RUF001
        "Spearman's rank correlation of the two accuracies: near 1, what is best on the target is best on average."
    )
    lost = sum(not point.target is not None for point in points)
    if lost:
        note += f" {lost} of {len(points)} settings diverged and are not shown."
    return note

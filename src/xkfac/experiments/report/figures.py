"""The figures of a report: as PNG, SVG and CSV files, and as SVG elements for its page."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from xkfac.experiments.recipes.parsing import LONGEST_NAME
from xkfac.experiments.recipes.recipe import Figure
from xkfac.experiments.report.drawing import SPREAD, Plot, Style, curves, style_of, whole_ticks
from xkfac.experiments.report.lines import Curve, ReportLine, ReportRun
from xkfac.experiments.report.multiples import draw_matrices, draw_training
from xkfac.experiments.report.scatter import SCATTER, draw_scatter
from xkfac.experiments.report.tables import number, printable, spread_cells
from xkfac.experiments.report.tradeoff_figure import TRADEOFF, draw_tradeoff
from xkfac.experiments.report.tradeoff_tables import Tradeoffs
from xkfac.experiments.runs.results import JobResult, Spread
from xkfac.experiments.tuning.trials import Point

_HEADER = ("line", "label", "tasks", *SPREAD)
_TABLES = ("summary", "accuracies", "areas")  # those CSV files are of tables


def draw_all(
    runs: Sequence[ReportRun],
    folder: Path,
    swept: Sequence[Tradeoffs] = (),
    tuned: Mapping[str, Sequence[Point]] | None = None,
) -> list[Plot]:
    """Draw all figures of some runs into a folder, which is made if need be.

    swept: the trade-off curves of the runs that have some. tuned: what the settings reached that a tuning tried, by the
    name of its run.
    """
    drawn = []
    keys = set(_TABLES)
    for found in swept:
        title = f"{TRADEOFF}: {found.run}" if len(swept) > 1 else TRADEOFF
        drawn.append(draw_tradeoff(_file_name("tradeoff", keys), found, folder, title))
    # Lines of sweeps are points of that figure, and too many for others.
    points = {found.run for found in swept}
    rest = [entry for run in runs for entry in run.lines if not (entry.line.sweep and run.name in points)]
    figures = [(_file_name(key, keys), figure, shown) for key, figure, shown in _figures(runs, rest)]
    drawn += [_accuracy(name, figure, shown, folder) for name, figure, shown in figures]
    for name, figure, shown in figures:
        in_sequence = [entry for entry in shown if not entry.reference and entry.curve(JobResult.forgetting)]
        if in_sequence:
            drawn.append(_forgetting(_file_name(name, keys, "-forgetting"), figure, in_sequence, folder))
    learnt = [entry for entry in rest if entry.reached and not entry.reference]
    if learnt:
        drawn.append(draw_matrices(_file_name("matrices", keys), learnt, folder))
    trained = [entry for entry in rest if any(job.epochs for job in entry.results.jobs)]
    if trained:
        drawn.append(draw_training(_file_name("training", keys), trained, folder))
    tuned = tuned or {}
    for run, tried in tuned.items():
        if any(point.target is not None for point in tried):
            title = f"{SCATTER}: {run}" if len(tuned) > 1 else SCATTER
            drawn.append(draw_scatter(_file_name("scatter", keys), tried, folder, title))
    return drawn


def _figures(runs: Sequence[ReportRun], must: Sequence[ReportLine]) -> list[tuple[str, Figure, list[ReportLine]]]:
    """Return the figures of all recipes, those of the same key as one, and one of `must` that are in none."""
    found: dict[str, Figure] = {}
    shown: dict[str, list[ReportLine]] = {}
    for run in runs:
        for key, figure in run.recipe.figures.items():
            found.setdefault(key, replace(figure, title=printable(figure.title)))
            shown.setdefault(key, []).extend(entry for entry in run.lines if entry.name in figure.lines)
    named = {entry.index for some in shown.values() for entry in some}
    others = [entry for entry in must if entry.index not in named]
    if others:
        title = "Other lines" if found else "Average accuracy"
        found["other lines"], shown["other lines"] = Figure(title), others
    return [(key, figure, shown[key]) for key, figure in found.items()]


def _file_name(key: str, taken: set[str], ending: str = "") -> str:
    """Return a name for files that any system takes, and that none of the figures so far has."""
    name = stem = (re.sub(r"[^a-z0-9_-]+", "-", key.lower()).strip("-")[:LONGEST_NAME] or "figure") + ending
    number_of = 2
    while name in taken:
        name, number_of = f"{stem}-{number_of}", number_of + 1
    taken.add(name)
    return name


def _accuracy(key: str, figure: Figure, lines: Sequence[ReportLine], folder: Path) -> Plot:
    title = figure.title or f"Average accuracy, {key}"
    plot = Plot(key, title, figure.note, f"{title}: average accuracy in percent", _HEADER, ())
    return _draw_curves(plot, lines, JobResult.average_accuracy, "average accuracy (%)", folder, better=1)


def _forgetting(key: str, figure: Figure, lines: Sequence[ReportLine], folder: Path) -> Plot:
    title = f"Forgetting: {figure.title}" if figure.title else "Forgetting"
    note = "How far accuracy on earlier tasks is below its best so far, on average, in percentage points."
    plot = Plot(key, title, note, f"{title}: points lost on earlier tasks", _HEADER, ())
    return _draw_curves(plot, lines, JobResult.forgetting, "forgetting (points)", folder, better=-1)


_Points = list[tuple[int, Spread]]


def _zoom(curves: Sequence[_Points], better: int) -> tuple[float, float] | None:
    """Return the range of the better half of the lines where worse ones leave it too small a part of the plot.

    better: 1 where more is better, -1 where less is.
    """
    worst = sorted(min(better * value.mean for _, value in curve) for curve in curves if curve)
    if len(worst) < 3:
        return None
    top = max(better * value.mean for curve in curves for _, value in curve)
    low = statistics.median_low(worst)
    if not 0 < top - low < 0.4 * (top - worst[0]):
        return None
    margin = 0.08 * (top - low)
    first, last = sorted((better * (low - margin), better * (top + margin)))
    return first, last


def _draw_curves(plot: Plot, lines: Sequence[ReportLine], of: Curve, what: str, folder: Path, *, better: int) -> Plot:
    shown = [(entry, entry.curve(of), style_of(entry.index, entry.hue, entry.line)) for entry in lines]
    rows = [
        [entry.name, entry.label, count, *spread_cells(value)] for entry, curve, _ in shown for count, value in curve
    ]
    # The legend has them as their ends stand in the plot.
    shown.sort(key=lambda each: -each[1][-1][1].mean if each[1] else math.inf)
    zoom = _zoom([curve for _, curve, _ in shown], better)
    longest = max((count for _, curve, _ in shown for count, _ in curve), default=1)

    def fill(axes: Axes) -> None:
        for entry, curve, style in shown:
            _draw_curve(axes, entry, curve, style, longest)
        axes.set_xlabel("number of tasks learnt")
        axes.set_xlim(1 - 0.02 * longest, longest + 0.03 * longest)
        axes.set_xticks(whole_ticks(longest, 8))
        axes.set_ylabel(what)
        axes.grid(axis="y")
        if better < 0 and axes.get_ylim()[0] > 0:
            axes.set_ylim(0, None)

    ends = [(entry.label, number(curve[-1][1] if curve else None), style) for entry, curve, style in shown]
    legend = [(f"{label}  {end}", style) for label, end, style in ends]
    said = "; ".join(f"{label} {end}" for label, end, _ in ends)
    plot = replace(plot, alt=f"{plot.alt} against the number of tasks learnt. At the end: {said}.", rows=rows)
    part = "upper" if better > 0 else "lower"
    return curves(plot, fill, legend, 4.4, folder, None if zoom is None else (part, {"ylim": zoom}))


def _draw_curve(axes: Axes, entry: ReportLine, curve: _Points, style: Style, longest: int) -> None:
    colour, counts = style["color"], [count for count, _ in curve]
    means = np.array([value.mean for _, value in curve])
    deviations = np.nan_to_num([value.deviation for _, value in curve])
    if not counts:
        return
    step = max(1, longest // 8)
    # Markers of one line lie between those of the next, so that lines on top of each other can be told apart.
    every = (min(entry.index % step, len(counts) - 1), step)
    if entry.reference:
        every = (0, 1)
        axes.errorbar(counts, means, deviations, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
        if len(counts) == 1:
            axes.axhline(means[0], color=colour, linestyle=(0, (4, 4)), linewidth=1)
    elif np.any(deviations > 0):
        axes.fill_between(counts, means - deviations, means + deviations, color=colour, alpha=0.16, linewidth=0)
    axes.plot(counts, means, markevery=every, **style)
    for before in set(entry.diverged):
        place = np.searchsorted(counts, before, side="right") - 1
        if place >= 0:
            cross: Style = {"color": colour, "markersize": 11, "markeredgewidth": 2.6, "zorder": 5}
            axes.plot(counts[place], means[place], "x", **cross)

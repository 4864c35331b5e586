"""Small multiples of a report, one plot per line: accuracy on every task, and losses over epochs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from xkfac.errors import shortened
from xkfac.experiments.report.drawing import SPREAD, Plot, multiples, whole_ticks
from xkfac.experiments.report.lines import ReportLine
from xkfac.experiments.report.styles import PALETTE
from xkfac.experiments.report.tables import printable, spread_cells
from xkfac.experiments.runs.results import Spread, spread

_MATRIX, _TRAINING = (190, 190), (330, 200)
_CELLS_WITH_NUMBERS = 6
_NAMED = 12  # tasks whose names an axis has room for
_COLOURS = colormaps["viridis"]
_TICKS = (20, 50, 80, 90, 95, 98)
_LONG = 15  # tasks from which on epochs are too dense to be read one by one


def draw_matrices(key: str, lines: Sequence[ReportLine], folder: Path) -> Plot:
    """Draw the accuracy on every task after every task as heat maps, one per line."""
    cells = [_cells(entry) for entry in lines]
    matrices = [np.full((entry.reached, entry.reached), np.nan) for entry in lines]
    for means, of in zip(matrices, cells, strict=True):
        for after, task, value in of:
            means[after - 1, task - 1] = value.mean
    low = min(float(np.nanmin(means)) for means in matrices)
    high = max(float(np.nanmax(means)) for means in matrices)
    ends = (10.0 * math.floor(low / 10), min(100.0, math.floor(high) + 1.0))

    def fill(axes: Axes, position: int) -> None:
        _draw_matrix(axes, matrices[position], ends, lines[position].order)

    title = "Accuracy on every task"
    note = (
        "One image per line, mean over repeats: each row is a moment, after so many tasks were learnt, each column a "
        "task. A column that darkens downwards is a task that is being forgotten. The scale is that of the "
        "logarithm of the error, so that small differences near 100% show beside lines that forget all."
    )
    named = any(entry.order for entry in lines)
    if any(entry.images and not entry.order for entry in lines):
        note += " Repeats met the tasks in different orders: where tasks have numbers, they are places in the order."
    alts = [
        f"{entry.label}: after {len(means)} tasks {np.nanmin(means[-1]):.1f}% on the worst and "
        f"{np.nanmax(means[-1]):.1f}% on the best task."
        for entry, means in zip(lines, matrices, strict=True)
    ]
    rows = []
    for entry, of in zip(lines, cells, strict=True):
        for after, task, value in of:
            name = [entry.order[task - 1] if entry.order else ""] if named else []
            rows.append([entry.name, entry.label, after, task, *spread_cells(value), *name])
    header = ["line", "label", "after_task", "task", *SPREAD, *(["name"] if named else [])]
    plot = Plot(key, title, note, "Heat maps of accuracy. " + " ".join(alts), header, rows)
    ticks = {tick: _shade(tick, ends) for tick in sorted({*ends, *(t for t in _TICKS if ends[0] < t < ends[1])})}

    def finish(canvas: Canvas) -> None:
        scale = canvas.colorbar(ScalarMappable(cmap=_COLOURS), ax=canvas.axes, location="top", shrink=0.6, aspect=40)
        scale.set_ticks(list(ticks.values()), labels=[f"{tick:g}%" for tick in ticks])
        scale.outline.set_visible(False)

    return multiples(plot, [e.label for e in lines], fill, _MATRIX, 4, folder, finish)


def _shade(accuracy: Any, ends: tuple[float, float]) -> Any:
    """Return where accuracies lie between the ends of a colour scale, from 0 to 1, by the logarithm of 1 + error."""
    first, last = (math.log1p(100 - end) for end in ends)
    return (first - np.log1p(100 - np.minimum(accuracy, 100))) / (first - last)


def _cells(entry: ReportLine) -> list[tuple[int, int, Spread]]:
    """Return (tasks learnt so far, task, accuracy over repeats), both counted from 1."""
    found = []
    for after in range(1, entry.reached + 1):
        rows = [job.accuracy[after - 1] for job in entry.results.jobs if len(job.accuracy) >= after]
        there = [row for row in rows if row is not None]
        for task in range(1, after + 1):
            value = spread([row[task - 1] for row in there if len(row) >= task])
            if value is not None:
                found.append((after, task, value))
    return found


def _draw_matrix(
    axes: Axes, means: np.ndarray[Any, Any], ends: tuple[float, float], names: Sequence[str] | None
) -> None:
    size = len(means)
    edge = (0.5, size + 0.5, size + 0.5, 0.5)
    image = np.ma.masked_invalid(_shade(means, ends))
    axes.imshow(image, cmap=_COLOURS, vmin=0, vmax=1, extent=edge, interpolation="none", aspect="equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2)
    if names is not None and size <= _NAMED:
        labels = [shortened(printable(name), 14) for name in names[:size]]
        axes.set_xticks(range(1, size + 1), labels, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(1, size + 1), labels)
        axes.set_ylabel("after learning", labelpad=2)
    else:
        axes.set_xticks(whole_ticks(size, 5))
        axes.set_yticks(whole_ticks(size, 5))
        axes.set_xlabel("task", labelpad=2)
        axes.set_ylabel("tasks learnt", labelpad=2)
    if size <= _CELLS_WITH_NUMBERS:
        for (row, column), value in np.ndenumerate(means):
            if math.isfinite(value):
                ink = "#fffffe" if _shade(value, ends) < 0.5 else "#000001"
                axes.text(column + 1, row + 1, f"{value:.0f}", ha="center", va="center", color=ink)


def draw_training(key: str, lines: Sequence[ReportLine], folder: Path) -> Plot:
    """Draw loss and penalty over epochs, one plot per line, all with the same scale."""
    curves = [(entry, {what: _epoch_curve(entry, what) for what in ("loss", "penalty")}) for entry in lines]
    values = [
        value.mean for _, of in curves for curve in of.values() for _, _, value in curve if 0 < value.mean < math.inf
    ]
    last = max((task for _, of in curves for curve in of.values() for task, _, _ in curve), default=1)
    bounds = (min(values) / 1.6, max(values) * 1.6) if values else (0.1, 10.0)

    def fill(axes: Axes, position: int) -> None:
        _draw_training(axes, *curves[position], bounds, last)

    title = "Loss and penalty while learning"
    note = "Mean over repeats at every epoch, on a logarithmic scale; a task ends and the next begins at whole numbers."
    if last >= _LONG:
        note += " The heavy lines join the last epochs of the tasks."
    alts = [f"{entry.label}: loss of the task and penalty over epochs." for entry in lines]
    rows: list[list[Any]] = []
    for entry, of in curves:
        values_at = [{(task, epoch): value for task, epoch, value in curve} for curve in of.values()]
        for place in sorted({place for known in values_at for place in known}):
            cells = (cell for known in values_at for cell in spread_cells(known.get(place)))
            rows.append([entry.name, entry.label, *place, *cells])
    header = ["line", "label", "task", "epoch", *(f"{what}_{cell}" for what in ("loss", "penalty") for cell in SPREAD)]
    plot = Plot(key, title, note, "Loss and penalty over epochs. " + " ".join(alts), header, rows)
    names = {"loss of the task": PALETTE[0], "penalty": PALETTE[1]}

    def finish(canvas: Canvas) -> None:
        handles = [Line2D([], [], color=colour, label=name) for name, colour in names.items()]
        canvas.legend(handles=handles, loc="outside upper right", ncols=2)

    return multiples(plot, [e.label for e in lines], fill, _TRAINING, 3, folder, finish)


_EpochCurve = list[tuple[int, int, Spread]]


def _epoch_curve(entry: ReportLine, what: str) -> _EpochCurve:
    """Return (task, epoch, spread over repeats), both counted from 1, of the loss or the penalty."""
    found: dict[tuple[int, int], list[float]] = {}
    for job in entry.results.jobs:
        for epoch in job.epochs:
            if epoch[what] is not None:
                found.setdefault((epoch["task"] + 1, epoch["epoch"] + 1), []).append(epoch[what])
    spreads = ((place, spread(values)) for place, values in sorted(found.items()))
    return [(*place, value) for place, value in spreads if value is not None]


def _draw_training(
    axes: Axes, entry: ReportLine, of: dict[str, _EpochCurve], bounds: tuple[float, float], last: int
) -> None:
    for hue, curve in enumerate(of.values()):
        places = [(task, task - 1 + epoch / entry.line.epochs, value.mean) for task, epoch, value in curve]
        xs, ys = _broken(places)
        if last < _LONG:
            axes.plot(xs, ys, color=PALETTE[hue], linewidth=1.2)
            continue
        ends = [(x, y) for x, y in {task: (x, y) for task, x, y in places}.values() if y > 0]
        axes.plot(xs, ys, color=PALETTE[hue], linewidth=0.6, alpha=0.5)
        axes.plot([x for x, _ in ends], [y for _, y in ends], color=PALETTE[hue], linewidth=2)
    axes.set_yscale("log")
    axes.set_ylim(*bounds)
    axes.set_xlim(0, last)
    axes.set_xlabel("tasks", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(axis="both")


def _broken(places: Sequence[tuple[int, float, float]]) -> tuple[list[float], list[float]]:
    """Return a curve that is broken between numbers of tasks that do not follow each other, as of joint training."""
    points: list[tuple[float, float]] = []
    before = 0
    for task, x, y in places:
        if task > before + 1:
            points.append((math.nan, math.nan))
        points.append((x, y if y > 0 else math.nan))  # a logarithm has no place for the penalty of the first task
        before = task
    return [x for x, _ in points], [y for _, y in points]

"""Small multiples of a report, one plot per line: accuracy on every task, and losses over epochs."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from xkfac.errors import shortened
from xkfac.experiments.report.drawing import PALETTE, SPREAD, Plot, Style, multiples, whole_ticks
from xkfac.experiments.report.lines import ReportLine
from xkfac.experiments.report.tables import printable, spread_cells
from xkfac.experiments.runs.results import Spread, spread

_MATRIX, _TRAINING = (190, 190), (330, 200)
_CELLS_WITH_NUMBERS = 6
_NAMED = 12  # tasks whose names an axis has room for
_COLOURS = "viridis"
_TICKS = (20, 50, 80, 90, 95, 98)
_LONG = 15  # tasks from which on epochs are too dense to be read one by one

Spreads = Mapping[tuple[int, int], Spread]
"""Numbers over repeats, by two numbers that are counted from 1."""


def draw_matrices(key: str, lines: Sequence[ReportLine], folder: Path) -> Plot:
    """Draw the accuracy on every task after every task as heat maps, one per line."""
    cells = [_cells(entry) for entry in lines]
    matrices = [np.full((entry.reached, entry.reached), np.nan) for entry in lines]
    for means, of in zip(matrices, cells, strict=True):
        for (after, task), value in of.items():
            means[after - 1, task - 1] = value.mean
    low = min(float(np.nanmin(means)) for means in matrices)
    high = max(float(np.nanmax(means)) for means in matrices)
    ends = (10.0 * math.floor(low / 10), min(100.0, math.floor(high) + 1.0))
    # Colours follow the logarithm of 1 + error.
    norm = FuncNorm(
        (lambda accuracy: -np.log1p(100 - np.minimum(accuracy, 100)), lambda shade: 100 - np.expm1(-shade)), *ends
    )
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
    rows = [
        [entry.name, entry.label, *place, *spread_cells(value)]
        + ([entry.order[place[1] - 1] if entry.order else ""] if named else [])
        for entry, of in zip(lines, cells, strict=True)
        for place, value in of.items()
    ]
    header = ["line", "label", "after_task", "task", *SPREAD, *(["name"] if named else [])]
    alt = "Heat maps of accuracy. " + " ".join(alts)
    plot = Plot(key, "Accuracy on every task", note, alt, header, rows)

    def finish(canvas: Canvas) -> None:
        mappable = ScalarMappable(norm, _COLOURS)
        scale = canvas.colorbar(mappable, ax=canvas.axes, location="top", shrink=0.6, aspect=40)
        ticks = sorted({*ends, *(tick for tick in _TICKS if ends[0] < tick < ends[1])})
        scale.set_ticks(ticks, labels=[f"{tick:g}%" for tick in ticks])
        scale.minorticks_off()
        scale.outline.set_visible(False)

    panels = {
        entry.label: partial(_draw_matrix, means=means, norm=norm, names=entry.order)
        for entry, means in zip(lines, matrices, strict=True)
    }
    return multiples(plot, panels, _MATRIX, 4, folder, finish)


def _cells(entry: ReportLine) -> Spreads:
    """Return the accuracy over repeats by the number of tasks learnt so far and the task."""
    moments = zip_longest(*(job.accuracy for job in entry.results.jobs))
    return {
        (after, task): value
        for after, rows in enumerate(moments, 1)
        for task, values in enumerate(zip_longest(*(row for row in rows if row is not None)), 1)
        if (value := spread(values)) is not None
    }


def _draw_matrix(axes: Axes, *, means: np.ndarray[Any, Any], norm: FuncNorm, names: Sequence[str] | None) -> None:
    size = len(means)
    edge = (0.5, size + 0.5, size + 0.5, 0.5)
    axes.imshow(means, _COLOURS, norm, extent=edge, interpolation="none", aspect="equal")
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
                ink = "#fffffe" if norm(value) < 0.5 else "#000001"
                axes.text(column + 1, row + 1, f"{value:.0f}", ha="center", va="center", color=ink)


def draw_training(key: str, lines: Sequence[ReportLine], folder: Path) -> Plot:
    """Draw loss and penalty over epochs, one plot per line, all with the same scale."""
    curves = [[_epochs(entry, what) for what in ("loss", "penalty")] for entry in lines]
    values = [value.mean for of in curves for curve in of for value in curve.values() if 0 < value.mean < math.inf]
    last = max((task for of in curves for curve in of for task, _ in curve), default=1)
    bounds = (min(values) / 1.6, max(values) * 1.6) if values else (0.1, 10.0)
    note = "Mean over repeats at every epoch, on a logarithmic scale; a task ends and the next begins at whole numbers."
    if last >= _LONG:
        note += " The heavy lines join the last epochs of the tasks."
    alts = [f"{entry.label}: loss of the task and penalty over epochs." for entry in lines]
    rows = [
        [entry.name, entry.label, *place, *(cell for curve in of for cell in spread_cells(curve.get(place)))]
        for entry, of in zip(lines, curves, strict=True)
        for place in sorted({place for curve in of for place in curve})
    ]
    header = ["line", "label", "task", "epoch", *(f"{what}_{cell}" for what in ("loss", "penalty") for cell in SPREAD)]
    alt = "Loss and penalty over epochs. " + " ".join(alts)
    plot = Plot(key, "Loss and penalty while learning", note, alt, header, rows)

    def finish(canvas: Canvas) -> None:
        names = zip(("loss of the task", "penalty"), PALETTE, strict=False)
        handles = [Line2D([], [], color=colour, label=name) for name, colour in names]
        canvas.legend(handles=handles, loc="outside upper right", ncols=2)

    panels = {
        entry.label: partial(_draw_training, curves=of, epochs=entry.line.epochs, bounds=bounds, last=last)
        for entry, of in zip(lines, curves, strict=True)
    }
    return multiples(plot, panels, _TRAINING, 3, folder, finish)


def _epochs(entry: ReportLine, what: str) -> Spreads:
    """Return the loss or the penalty over repeats by task and epoch."""
    found: dict[tuple[int, int], list[float]] = {}
    for job in entry.results.jobs:
        for epoch in job.epochs:
            found.setdefault((epoch["task"] + 1, epoch["epoch"] + 1), []).append(epoch[what])
    return {place: value for place, of in sorted(found.items()) if (value := spread(of)) is not None}


def _draw_training(
    axes: Axes, *, curves: Sequence[Spreads], epochs: int, bounds: tuple[float, float], last: int
) -> None:
    dense: Style = {"linewidth": 0.6, "alpha": 0.5} if last >= _LONG else {"linewidth": 1.2}
    for curve, colour in zip(curves, PALETTE, strict=False):
        points: list[tuple[float, float]] = []
        ends: dict[int, tuple[float, float]] = {}
        before = 0
        for (task, epoch), value in curve.items():
            # A logarithm has no place for the penalty of the first task.
            ends[task] = (task - 1 + epoch / epochs, value.mean if value.mean > 0 else math.nan)
            # Between numbers of tasks that do not follow each other, as of joint training, the curve is broken.
            points += [(math.nan, math.nan)] if task > before + 1 else []
            points.append(ends[task])
            before = task
        axes.plot(*np.reshape(points, (-1, 2)).T, color=colour, **dense)
        if last >= _LONG:
            axes.plot(*np.reshape([end for end in ends.values() if end[1] > 0], (-1, 2)).T, color=colour, linewidth=2)
    axes.set_yscale("log")
    axes.set_ylim(*bounds)
    axes.set_xlim(0, last)
    axes.set_xlabel("tasks", labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(axis="both")

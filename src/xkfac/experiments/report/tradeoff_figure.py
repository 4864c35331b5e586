"""The figure of trade-off curves: source kept against target learnt, one curve per method, one marker per value."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from xkfac.experiments.report.drawing import DOTTED, HOLLOW, INK, Limits, Plot, Style, curves, style_of
from xkfac.experiments.report.lines import HUES
from xkfac.experiments.report.tables import number, spread_cells
from xkfac.experiments.report.tradeoff_tables import Tradeoff, Tradeoffs, in_percent, reach
from xkfac.experiments.runs.results import Spread

TRADEOFF = "Source kept against target learnt"
_NEAR = 80.0  # the enlarged panel shows what keeps at least so much, in %

_HEADER = (
    *("sweep", "label", "key", "value"),
    *("kept", "kept_deviation", "share", "share_deviation", "repeats", "diverged"),
)
_Placed = list[tuple[Spread, Spread]]


def draw_tradeoff(key: str, found: Tradeoffs, folder: Path, title: str = TRADEOFF) -> Plot:
    """Draw the curves of a run's sweeps, and lines that are in none as single markers.

    Points are means over repeats with bars of one standard deviation. Dotted lines are the source network's accuracy
    and the ceilings of the targets.
    """
    shown = [*found.curves, *found.alone]
    styles = [_style(place, curve) for place, curve in enumerate(shown)]
    placed = [
        [(in_percent(p.kept), in_percent(p.share)) for p in curve.points if p.kept and p.share] for curve in shown
    ]
    ends = "; ".join(f"{curve.label} {number(curve.area, 3)}" for curve in found.curves)
    what = f"{found.what} (%)"
    alt = f"{title}: {what} against what is kept of {found.source} in percent. Areas under the curves: {ends}."
    note = (
        "Each marker is one value of what is swept: a strength, or a learning rate. Further right, more of "
        f"{found.source} is kept; further up, more is learnt. Dotted lines: the source network"
        + (", and networks of their own for the targets" if found.tops else "")
        + ". Numbers beside a name are areas under the curve."
    )
    plot = Plot(key, title, note, alt, _HEADER, _rows(found))

    def fill(axes: Axes) -> None:
        for points, style in zip(placed, styles, strict=True):
            _draw(axes, points, style)
        # What the source network has of the source, and what networks of their own have of the targets.
        for draw in (axes.axvline, *([axes.axhline] if found.tops else [])):
            draw(100, color=INK, linestyle=DOTTED, linewidth=1, zorder=0)
        axes.set_xlabel(f"{found.source} kept (%)")
        axes.set_ylabel(what)
        axes.grid()

    labels = [f"{curve.label}  {number(curve.area, 3)}" if curve.key else curve.label for curve in shown]
    return curves(plot, fill, list(zip(labels, styles, strict=True)), 5.2, folder, _enlarged(placed))


def _rows(found: Tradeoffs) -> list[list[Any]]:
    return [
        [curve.name, curve.label, curve.key, "" if point.value is None else point.value]
        + [cell for of in (point.kept, point.share) for cell in spread_cells(of)[:2]]
        + [len(point.by_seed), len(point.entry.diverged)]
        for curve in (*found.curves, *found.alone)
        for point in curve.points
    ]


def _style(place: int, curve: Tradeoff) -> Style:
    """Return the style of a curve: dashes tell the kind of curvature, colour and marker the method."""
    style = style_of(place, place % HUES, curve.points[0].entry.line)
    return style if curve.key else style | HOLLOW | {"markersize": 1.4 * style["markersize"]}


def _draw(axes: Axes, points: _Placed, style: Style) -> None:
    x, y = ([spread.mean for spread in of] for of in zip(*points, strict=True)) if points else ([], [])
    bars = [np.nan_to_num([pair[axis].deviation for pair in points]) for axis in (0, 1)]
    if any(bar.any() for bar in bars):
        axes.errorbar(x, y, bars[1], bars[0], fmt="none", ecolor=style["color"], elinewidth=0.8, alpha=0.6)
    axes.plot(x, y, **style)


def _enlarged(placed: Sequence[_Placed]) -> tuple[str, Limits] | None:
    """Return the part that keeps most of the source, where it is crowded into a small part of the figure."""
    curves = [[(kept.mean, share.mean) for kept, share in curve] for curve in placed]
    near = [point for curve in curves for point in curve if point[0] >= _NEAR]
    least = min((x for curve in curves for x, _ in curve), default=_NEAR)
    if len(near) < 3 or least > _NEAR - 20:
        return None
    right, low = max(x for x, _ in near), min(y for _, y in near)
    high = max(reached for curve in curves if (reached := reach(curve, _NEAR)) is not None)
    margin = 0.06 * max(high - low, 1.0)
    return "upper right", {"xlim": (_NEAR, max(right, 100.0) + 0.5), "ylim": (low - margin, high + margin)}

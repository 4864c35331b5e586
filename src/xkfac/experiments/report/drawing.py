"""What all figures of a report share: their parts, their files, their form in a page."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from xkfac.errors import shortened
from xkfac.experiments.files import write_file
from xkfac.experiments.report.styles import Style, inline_svg, looks, rendered
from xkfac.experiments.report.tables import csv_text

SPREAD = ("mean", "deviation", "repeats")
_STEPS = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]


Limits = dict[str, tuple[float, float]]
"""The `xlim` and `ylim` of axes, where they are set."""


@dataclass(frozen=True)
class Plot:
    """A figure: its name, what it shows in words, its numbers, and, once it is drawn, its form in a page.

    key: the name of its files. alt: what it shows, for those who do not see it. header, rows: of its CSV file.
    """

    key: str
    title: str
    note: str
    alt: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(repr=False)
    element: str = field(default="", repr=False)


def multiples(
    plot: Plot,
    panels: Mapping[str, Callable[[Axes], None]],
    size: tuple[int, int],
    across: int,
    folder: Path,
    finish: Callable[[Canvas], None],
) -> Plot:
    """Draw panels under their titles, of a size in points, so many in a row; `finish` adds what they share."""
    across = min(across, len(panels))
    down = math.ceil(len(panels) / across)
    with looks(8):
        canvas = Canvas(figsize=(across * size[0] / 72, down * (size[1] + 24) / 72 + 0.8), layout="constrained")
        for position, (label, fill) in enumerate(panels.items(), 1):
            axes = canvas.add_subplot(down, across, position)
            fill(axes)
            axes.set_title(textwrap.fill(shortened(label, size[0] // 3), size[0] // 6))
        finish(canvas)
        return save(canvas, plot, folder)


def curves(
    plot: Plot,
    fill: Callable[[Axes], None],
    legend: Sequence[tuple[str, Style]],
    height: float,
    folder: Path,
    enlarged: tuple[str, Limits] | None,
) -> Plot:
    """Draw curves on a panel of a height in inches, with a legend; `enlarged`, a part of them on a second one below."""
    panels = [("", Limits()), *([enlarged] if enlarged else [])]
    with looks(10):
        down = math.ceil(len(legend) / 2)
        canvas = Canvas(figsize=(8, height * len(panels) + 0.23 * down + 0.5), layout="constrained")
        for position, (part, limits) in enumerate(panels, 1):
            axes = canvas.add_subplot(len(panels), 1, position)
            fill(axes)
            axes.set(title=f"The {part} part, enlarged" if part else "", **limits)
        handles = [Line2D([], [], label=shortened(label, 60), **style) for label, style in legend]
        canvas.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=9, handlelength=3.4)
        return save(canvas, plot, folder)


def whole_ticks(last: int, most: int) -> list[int]:
    """Return whole numbers from 1 to `last` for an axis: both ends, and round ones between that keep clear of them."""
    step = next(step for step in _STEPS if last / step <= most)
    between = range(step, last, step)
    return sorted({1, last, *(tick for tick in between if tick - 1 >= 0.7 * step and last - tick >= 0.7 * step)})


def save(canvas: Canvas, plot: Plot, folder: Path) -> Plot:
    """Write the files of a figure; return it with its form in a page."""
    canvas.suptitle(shortened(plot.title, 90), x=0.01, ha="left", fontsize=11)
    write_file(folder / f"{plot.key}.png", rendered(canvas, "png"))
    canvas.set_layout_engine("none")  # what the first drawing laid out holds for the second
    svg = rendered(canvas, "svg")
    write_file(folder / f"{plot.key}.svg", svg)
    write_file(folder / f"{plot.key}.csv", csv_text(plot.header, plot.rows).encode())
    return replace(plot, element=inline_svg(svg.decode(), f"{plot.key}.", plot.alt))

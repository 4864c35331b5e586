"""What all figures of a report share: their parts, their files, their form in a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from xkfac.errors import XkfacError
from xkfac.experiments.files import replace_file
from xkfac.experiments.report.styles import Style, inline_svg, looks, rendered
from xkfac.experiments.report.tables import csv_text

SPREAD = ("mean", "deviation", "repeats")
_STEPS = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]


class Fill(Protocol):
    """Draws the plot of a figure that has a position among its plots."""

    def __call__(self, axes: Axes, position: int) -> None:
        """Draw into some axes."""


@dataclass(frozen=True)
class Key:
    """An item of a legend. series: the class of what it names in the SVG elements."""

    label: str
    swatch: str
    value: str = ""
    note: str = ""
    series: str = ""


@dataclass(frozen=True)
class Panel:
    """One plot of a figure as SVG elements of a page; `narrow` is drawn for a phone, empty if `wide` will do."""

    title: str
    alt: str
    wide: str
    narrow: str = ""


@dataclass(frozen=True)
class Scale:
    """A colour scale: where between 0 and 1 some accuracies lie, and its colours at equal distances."""

    ticks: Mapping[float, float]
    colours: tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """A figure: its files, what it shows in words, and what a page needs to show it.

    kind: `curves`, `matrices` or `training`. scale: of colours, if it has one.
    """

    key: str
    title: str
    note: str
    png: Path
    svg: Path
    csv: Path
    alt: str
    kind: str = "curves"
    panels: tuple[Panel, ...] = field(default=(), repr=False)
    legend: tuple[Key, ...] = field(default=(), repr=False)
    scale: Scale | None = None


@dataclass(frozen=True)
class Plot:
    """What `save` needs to know of a figure, whatever it shows."""

    key: str
    title: str
    note: str
    alt: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


def element(fill: Callable[[Axes], None], size: tuple[int, int], prefix: str, titles: dict[str, str], alt: str) -> str:
    """Return a plot as an SVG element whose units are the pixels of a page."""
    with looks(12.5 if size[0] > 400 else 11):
        canvas = Canvas(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        fill(canvas.add_subplot())
        return inline_svg(canvas, prefix, titles, alt)


def multiples(
    plot: Plot,
    labels: Sequence[str],
    alts: Sequence[str],
    fill: Fill,
    size: tuple[int, int],
    across: int,
    folder: Path,
    finish: Callable[[Canvas], None] = lambda _: None,
) -> tuple[tuple[Path, Path, Path], tuple[Panel, ...]]:
    """Draw small multiples: as one file, and one by one for a page that sets them in rows as its width allows."""
    panels = []
    for position, (label, alt) in enumerate(zip(labels, alts, strict=True)):
        svg = element(partial(fill, position=position), size, f"{plot.key}.{position}.", {}, alt)
        panels.append(Panel(label, alt, svg))
    across = min(across, len(labels))
    down = math.ceil(len(labels) / across)
    with looks(8):
        canvas = Canvas(figsize=(across * size[0] / 72, down * (size[1] + 24) / 72 + 0.8), layout="constrained")
        canvas.suptitle(plot.title, fontsize=10, x=0.01, ha="left")
        for position, label in enumerate(labels):
            axes = canvas.add_subplot(down, across, position + 1)
            fill(axes, position)
            axes.set_title(textwrap.fill(shortened(label, size[0] // 3), size[0] // 6))
        finish(canvas)
        files = save(canvas, plot, folder)
    return files, tuple(panels)


def curves(
    plot: Plot,
    titles: Sequence[str],
    fill: Fill,
    legend: Sequence[tuple[Key, Style]],
    sizes: tuple[tuple[int, int], tuple[int, int]],
    height: float,
    tips: dict[str, str],
    folder: Path,
) -> Drawn:
    """Draw panels of curves with one legend: as one file of a height in inches, and as elements for a page.

    sizes: of an element on a wide page and on a phone. tips: the tooltips of artists by their gid.
    """
    panels = []
    for position, title in enumerate(titles):
        wide, narrow = (
            element(partial(fill, position=position), size, f"{plot.key}.{position}{letter}.", tips, plot.alt)
            for size, letter in zip(sizes, "wn", strict=True)
        )
        panels.append(Panel(title, plot.alt, wide, narrow))
    with looks(10):
        canvas = Canvas(figsize=(8, height), layout="constrained")
        for position, title in enumerate(titles):
            axes = canvas.add_subplot(len(titles), 1, position + 1)
            fill(axes, position)
            axes.set_title(title or shortened(plot.title, 90))
        handles = [Line2D([], [], label=shortened(key.label), **style.plot) for key, style in legend]
        canvas.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=9, handlelength=3.4)
        files = save(canvas, plot, folder)
    keys = tuple(key for key, _ in legend)
    return Drawn(plot.key, plot.title, plot.note, *files, plot.alt, "curves", tuple(panels), keys)


def whole_ticks(last: int, most: int) -> list[int]:
    """Return whole numbers from 1 to `last` for an axis: both ends, and round ones between that keep clear of them."""
    step = next(step for step in _STEPS if last / step <= most)
    between = range(step, last, step)
    return sorted({1, last, *(tick for tick in between if tick - 1 >= 0.7 * step and last - tick >= 0.7 * step)})


def shortened(label: str, width: int = 60) -> str:
    """Return a label of at most so many characters."""
    return label if len(label) <= width else label[: width - 1] + "…"


def save(canvas: Canvas, plot: Plot, folder: Path) -> tuple[Path, Path, Path]:
    """Write the files of a figure."""
    png, svg, table = (folder / f"{plot.key}.{kind}" for kind in ("png", "svg", "csv"))
    write_file(png, rendered(canvas, "png"))
    canvas.set_layout_engine("none")  # what the first drawing laid out holds for the second
    write_file(svg, rendered(canvas, "svg"))
    write_file(table, csv_text(plot.header, plot.rows).encode())
    return png, svg, table


def write_file(path: Path, content: bytes) -> None:
    """Write a file, replacing what is there only once all is written.

    Raises XkfacError when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise XkfacError(
            f"'{path}' could not be written ({error.strerror}); free space, or choose another folder"
        ) from None

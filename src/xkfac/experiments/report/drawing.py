"""What all figures of a report share: colours and markers, panels and legends, their files, their form in a page."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from xkfac.errors import shortened
from xkfac.experiments.files import write_file
from xkfac.experiments.recipes.recipe import UNPROTECTED, Line
from xkfac.experiments.report.tables import csv_text

INK, SOFT, GRID = "#1c2126", "#5d6670", "#e1e5ea"
# Okabe and Ito's colours, the pale ones darkened until they stand out from white by 3 to 1; a page may lighten them.
PALETTE = ("#0072b2", "#d55e00", "#00906a", "#bb5f96", "#b87d00", "#3b93cf", "#6d4fb3")
# Colours alone tell seven lines of a figure apart, with markers some sixty.
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "*", ">")
_SIZES = {"*": 1.35, "D": 0.85, "P": 1.1}
# The CSS variable of each colour that a page may change.
_VARIABLES = {"#ffffff": "var(--paper)", INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--grid)"} | {
    hue: f"var(--hue-{i})" for i, hue in enumerate(PALETTE)
}
# Ink and gap in widths of the line, by the kind of curvature; lines of other kinds are solid.
_DASHES = {"kfac": (0, (5.0, 2.2)), "diagonal": (0, (1.4, 1.6)), "none": (0, (7.0, 2.0, 1.4, 2.0))}
DOTTED = (0, (1.0, 3.0))
SPREAD = ("mean", "deviation", "repeats")
_STEPS = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]

Style = dict[str, Any]
"""How a line is drawn: arguments of matplotlib's `plot`."""
HOLLOW: Style = {"markerfacecolor": "none", "markeredgewidth": 1.3}
Limits = dict[str, tuple[float, float]]
"""The `xlim` and `ylim` of axes, where they are set."""


def style_of(index: int, hue: int, line: Line) -> Style:
    """Return the style of a line: dashes tell the kind of curvature, colour and marker the line."""
    marker = MARKERS[index % len(MARKERS)]
    size = 6.0 * _SIZES.get(marker, 1.0)
    if line.method in UNPROTECTED:
        return {"color": INK, "linestyle": DOTTED, "marker": marker, "markersize": size + 1, **HOLLOW}
    method = line.resolved_method()
    dashes = _DASHES.get(method.settings.kind if method.penalised else "none", "solid")
    return filled(PALETTE[hue], marker, size) | {"linestyle": dashes}


def filled(colour: str, marker: str, size: float = 6.0) -> Style:
    """Return the style of filled markers."""
    return {"color": colour, "marker": marker, "markersize": size, "markeredgewidth": 0.0}


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


@contextmanager
def looks(font: float) -> Iterator[None]:
    """Set matplotlib up for our figures, and back afterwards."""
    sizes: dict[Any, Any] = {"font.size": font, "axes.titlesize": font}
    with mpl.rc_context(sizes, Path(__file__).with_name("figures.mplstyle")), warnings.catch_warnings():
        # Labels may use scripts that the font of the PNG does not have; the SVG shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


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


def rendered(canvas: Canvas, kind: str) -> bytes:
    """Return a figure as the bytes of a `png` or `svg` file, the same for the same figure."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    canvas.savefig(buffer, format=kind, dpi=144, metadata=metadata)
    return buffer.getvalue()


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """Return the SVG file of a figure as an element of a page: with its font, and its colours as CSS variables.

    prefix: makes ids unique in the page. label: what the figure shows, for those who do not see it.
    """
    svg = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    root, _, rest = svg.partition(">")
    size = re.findall(r'viewBox="[^"]*"', root)[0]
    rest = re.sub(r"<[^>]*>", lambda match: _adopted(match[0], prefix), rest)
    return f'<svg {size} role="img" aria-label="{escape(label)}">{rest}'


def _adopted(tag: str, prefix: str) -> str:
    """Change a tag of matplotlib's SVG into one of a page."""
    tag = re.sub(r'((?<=\s)id="|url\(#)', rf"\g<1>{prefix}", tag).replace('xlink:href="#', f'href="#{prefix}')
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag.replace("xlink:href", "href"))
    tag = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag)
    return re.sub(r"#[0-9a-f]{6}", lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)

"""How the figures of a report look: colours, markers and dashes, and SVG that takes its colours from a page."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from xkfac.experiments.recipes.recipe import UNPROTECTED, Line

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

Style = dict[str, Any]
"""How a line is drawn: arguments of matplotlib's `plot`."""
HOLLOW: Style = {"markerfacecolor": "none", "markeredgewidth": 1.3}


def style_of(index: int, hue: int, line: Line) -> Style:
    """Return the style of a line: dashes tell the kind of curvature, colour and marker the line."""
    marker = MARKERS[index % len(MARKERS)]
    size = 6.0 * _SIZES.get(marker, 1.0)
    if line.method in UNPROTECTED:
        return {"color": INK, "linestyle": DOTTED, "marker": marker, "markersize": size + 1, **HOLLOW}
    method = line.resolved_method()
    dashes = _DASHES.get(method.settings.kind if method.penalised else "none", "solid")
    return filled(PALETTE[hue % len(PALETTE)], marker, size) | {"linestyle": dashes}


def filled(colour: str, marker: str, size: float = 6.0) -> Style:
    """Return the style of filled markers."""
    return {"color": colour, "marker": marker, "markersize": size, "markeredgewidth": 0.0}


@contextmanager
def looks(font: float) -> Iterator[None]:
    """Set matplotlib up for our figures, and back afterwards."""
    sizes: dict[Any, Any] = {"font.size": font, "axes.titlesize": font}
    with mpl.rc_context(sizes, Path(__file__).with_name("figures.mplstyle")), warnings.catch_warnings():
        # Labels may use scripts that the font of the PNG does not have; the SVG shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


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

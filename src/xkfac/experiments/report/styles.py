"""How the figures of a report look: colours, markers and dashes, and SVG that takes its colours from a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.markers import MarkerStyle

from xkfac.experiments.recipes.recipe import UNPROTECTED, Line

INK, SOFT, GRID = "#1c2126", "#5d6670", "#e1e5ea"
# Okabe and Ito's colours, the pale ones darkened until they stand out from white by 3 to 1; a page may lighten them.
PALETTE = ("#0072b2", "#d55e00", "#00906a", "#bb5f96", "#b87d00", "#3b93cf", "#6d4fb3")
# Colours alone tell seven lines of a figure apart, with markers some sixty.
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "*", ">")
_SIZES = {"*": 1.35, "D": 0.85, "P": 1.1}
DASHES: dict[str, tuple[float, ...]] = {
    "xkfac": (),
    "corrected": (),
    "kfac": (5.0, 2.2),
    "diagonal": (1.4, 1.6),
    "none": (7.0, 2.0, 1.4, 2.0),
    "reference": (1.0, 3.0),
}


@dataclass(frozen=True)
class Style:
    """How a line is drawn. dash: ink and gap in widths of the line, nothing for a solid one. size: of the marker."""

    colour: str
    dash: tuple[float, ...]
    marker: str
    size: float
    hollow: bool = False

    @property
    def plot(self) -> dict[str, Any]:
        """The arguments of matplotlib's `plot`."""
        face = "none" if self.hollow else self.colour
        dashes: Any = (0, self.dash) if self.dash else "solid"
        return {
            "color": self.colour,
            "linestyle": dashes,
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": face,
            "markeredgewidth": 1.3 if self.hollow else 0.0,
        }


def style_of(index: int, hue: int, line: Line) -> Style:
    """Return the style of a line: dashes tell the kind of curvature, colour and marker the line."""
    marker = MARKERS[index % len(MARKERS)]
    size = 6.0 * _SIZES.get(marker, 1.0)
    if line.method in UNPROTECTED:
        return Style(INK, DASHES["reference"], marker, size + 1, hollow=True)
    method = line.resolved_method()
    kind = method.settings.kind if method.penalised else "none"
    return Style(PALETTE[hue % len(PALETTE)], DASHES.get(kind, ()), marker, size)


@contextmanager
def looks(font: float) -> Iterator[None]:
    """Set matplotlib up for our figures, and back afterwards."""
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "xkfac",
        "text.parse_math": False,  # a label may have dollars
        "font.family": ["DejaVu Sans"],
        "font.size": font,
        "text.color": INK,
        "axes.labelcolor": SOFT,
        "axes.edgecolor": SOFT,
        "axes.linewidth": 0.8,
        "axes.titlesize": font,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "lines.linewidth": 1.8,
        "lines.scale_dashes": True,
        "lines.dash_capstyle": "butt",
        "legend.frameon": False,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # Labels may use scripts that the font of the PNG does not have; the SVG shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def rendered(canvas: Canvas, kind: str) -> bytes:
    """Return a figure as the bytes of a `png` or `svg` file, the same for the same figure."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    canvas.savefig(buffer, format=kind, dpi=144, metadata=metadata)
    return buffer.getvalue()


def colour_variables() -> Mapping[str, str]:
    """Return the CSS variable of each colour that figures use."""
    return {INK: "--ink", SOFT: "--soft", GRID: "--grid"} | {hue: f"--hue-{i}" for i, hue in enumerate(PALETTE)}


def inline_svg(canvas: Canvas, prefix: str, titles: Mapping[str, str], label: str) -> str:
    """Return a figure as an SVG element for a page: its fonts, its colours as CSS variables, its background.

    prefix: makes ids unique in the page. titles: the tooltips of artists by their gid, which becomes their class.
    label: what the figure shows, for those who do not see it.
    """
    canvas.patch.set_visible(False)
    for axes in canvas.axes:
        axes.patch.set_visible(False)
    root = ElementTree.fromstring(rendered(canvas, "svg"))
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        _adopt(element, prefix, titles)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _adopt(element: ElementTree.Element, prefix: str, titles: Mapping[str, str]) -> None:
    """Change an element of matplotlib's SVG into one of a page."""
    element.tag = _local(element.tag)
    element.text, element.tail = (element.text or "").strip(), ""
    given = {_local(key): value for key, value in element.attrib.items()}
    element.attrib.clear()
    gid = given.get("id", "")
    if element.tag == "g":
        given.pop("id", None)
    elif gid:
        given["id"] = prefix + gid
    if gid in titles:
        given["class"] = gid.rpartition("-")[0] + " " + gid
        title = ElementTree.Element("title")
        title.text = titles[gid]
        element.insert(0, title)
    if "href" in given:
        given["href"] = given["href"].replace("\n", "").replace("#", f"#{prefix}", 1)
    if "clip-path" in given:
        given["clip-path"] = given["clip-path"].replace("#", f"#{prefix}")
    if "d" in given:
        given["d"] = _short_path(given["d"])
    for key in ("x", "y", "transform"):
        if key in given and element.tag != "image":
            given[key] = re.sub(r"-?\d+\.\d+", _rounded, given[key])
    if given.get("transform", "").startswith("rotate(-0 "):
        del given["transform"]
    if "style" in given:
        given["style"] = _page_style(given["style"])
    element.attrib |= given


def _short_path(path: str) -> str:
    return " ".join(re.sub(r"-?\d+\.\d+", _rounded, path).split())


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _page_style(style: str) -> str:
    variables = colour_variables()
    style = re.sub(r"font-family: [^;]*;? ?", "", style)
    return re.sub(r"#[0-9a-f]{6}", lambda m: f"var({variables[m[0]]})" if m[0] in variables else m[0], style)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def swatch(style: Style) -> str:
    """Return a small SVG element that shows a line's colour, dashes and marker, for the legend of a page."""
    shape = MarkerStyle(style.marker)
    outline = shape.get_path().transformed(shape.get_transform())
    points = np.asarray(outline.to_polygons(width=0, height=0)[0], dtype=float)
    path = "M" + "L".join(f"{18 + style.size * x:.1f} {7 - style.size * y:.1f}" for x, y in points) + "Z"
    colour = f"var({colour_variables()[style.colour]})"
    dash = f' stroke-dasharray="{" ".join(f"{1.8 * part:g}" for part in style.dash)}"' if style.dash else ""
    fill = f'fill="none" stroke-width="1.3" stroke="{colour}"' if style.hollow else f'fill="{colour}"'
    return (
        '<svg class="swatch" viewBox="0 0 36 14" aria-hidden="true">'
        f'<path d="M1 7H35" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/><path d="{path}" {fill}/></svg>'
    )

"""A figure of what a memory holds: the spectrum of each unit, and how much of it is common to a mini-batch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from xkfac.errors import XkfacError
from xkfac.experiments.report.drawing import GRID, PALETTE


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw what `inspect_memory` found to a file whose ending names its format, such as .png, .svg or .pdf.

    Left, how many eigenvalues of each unit lie in each decade, those of the terms of a sum counted together. Right, the
    share of the last term, H'' for XK-FAC, in the trace of each unit.
    """
    units = found["units"]
    if not units:
        raise XkfacError(f"'{found['file']}' protects no unit, so there is nothing to draw")
    counts, tops = _counts(units)
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(units)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    extent = (tops[0], tops[-1] + 1, len(units) - 0.5, -0.5)
    shades = [[math.log10(1 + count) for count in row] for row in counts]
    image = left.imshow(shades, aspect="auto", extent=extent, cmap="Blues", vmin=0)
    figure.colorbar(image, ax=left, label="log10 (1 + eigenvalues)", location="top", shrink=0.6)
    left.set_yticks(range(len(units)), [unit["unit"] for unit in units])
    left.set_xlabel("log10 of an eigenvalue")
    right.barh(range(len(units)), [100 * (unit["between"] or 0) for unit in units], color=PALETTE[0])
    right.set(xlim=(0, 100), xlabel="% of the trace that a mini-batch has in common (H'')")
    right.grid(axis="x", color=GRID)
    right.set_axisbelow(True)
    figure.suptitle(f"{found['method']}, tasks: {found['tasks']}, examples: {found['examples']:,}")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise XkfacError(f"'{path}' cannot be drawn ({error}); name a file that ends in .png, .svg or .pdf") from None


def _counts(units: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], range]:
    """Return how many eigenvalues of each unit lie in each decade, and the logarithms that the decades begin at."""
    found = [Counter[int]() for _ in units]
    for own, unit in zip(found, units, strict=True):
        for spectrum in unit["spectra"]:
            if spectrum["largest"] > 0:
                top = math.floor(math.log10(spectrum["largest"]))
                own.update({top - depth: count for depth, count in enumerate(spectrum["decades"])})
    places = [place for own in found for place, count in own.items() if count] or [0]
    tops = range(min(places), max(places) + 1)
    return [[own[top] for top in tops] for own in found], tops

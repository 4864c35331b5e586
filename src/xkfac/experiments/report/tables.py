"""Tables of a report, each written once and shown by the terminal and the page, and their numbers as text."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from xkfac.experiments.runs.results import Spread

NOTHING = "–"  # noqa: RUF001, an en dash is what a reader of a table expects in an empty cell
MINUS = "−"  # noqa: RUF001, as wide as a digit


def number(value: Spread | None, digits: int = 2) -> str:
    """Return "mean ± deviation", the mean alone for a single repeat, or a dash."""
    if value is None:
        return NOTHING
    mean = f"{value.mean:.{digits}f}"
    return mean if math.isnan(value.deviation) else f"{mean} ± {value.deviation:.{digits}f}"


def decimal(value: float | None, form: str = ".2f") -> str:
    """Return a number in a format, its minus sign as wide as a digit; a dash for None and for no number."""
    return NOTHING if value is None or math.isnan(value) else format(value, form).replace("-", MINUS)


def spread_text(value: Spread | None, digits: int = 2) -> Markup:
    """Return mean and deviation as elements of a page."""
    mean, _, deviation = number(value, digits).replace("-", MINUS).partition(" ± ")
    # No-break spaces: a number and its deviation stay in one line of a text.
    return Markup(f'{mean}&nbsp;<span class="soft">±&nbsp;{deviation}</span>' if deviation else mean)


def counted(number_of: int, word: str) -> str:
    """Return a number with its word, in the plural if need be."""
    return f"{number_of} {word}" if number_of == 1 else f"{number_of} {word}s"


def printable(text: str) -> str:
    """Return a label in one line without characters that XML forbids."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def best_places(values: Sequence[Spread | None], digits: int, better: int = 1) -> set[int]:
    """Return where the best of some values are, as far as digits show; nowhere if none is better than another."""
    shown = {place: round(value.mean, digits) for place, value in enumerate(values) if value is not None}
    top = max(shown.values(), key=lambda value: better * value, default=None)
    return {place for place, value in shown.items() if value == top} if len(set(shown.values())) > 1 else set()


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a CSV file as text."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    return buffer.getvalue()


def spread_cells(value: Spread | None) -> list[Any]:
    """Return mean, deviation and count as cells of a CSV file, empty where there is no number."""
    if value is None:
        return ["", "", 0]
    return [value.mean, "" if math.isnan(value.deviation) else value.deviation, value.count]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a number over repeats, or words. best: whether it is the best of its column. note: on it."""

    value: Spread | str | None
    digits: int = 2
    best: bool = False
    note: str = ""

    def text(self) -> str:
        """Return it as a terminal shows it, with a * if it is the best."""
        shown = self.value if isinstance(self.value, str) else number(self.value, self.digits)
        return shown + (" *" if self.best else "") + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Row:
    """A row of a table. notes: what a reader must know of it. reference: it is no competitor. below: a second line."""

    label: str
    cells: Sequence[Cell]
    notes: Sequence[str] = ()
    reference: bool = False
    below: str = ""


@dataclass(frozen=True)
class Table:
    """A table. heads: of its columns, that of the labels first. words: those of columns that hold words."""

    name: str
    caption: str
    heads: Sequence[str]
    blocks: Sequence[Sequence[Row]]
    words: Sequence[str] = ()

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows as a terminal shows them, notes in a column and an empty row between blocks."""
        noted = any(row.notes for block in self.blocks for row in block)
        rows: list[list[str]] = []
        for block in self.blocks:
            rows += [[]] if rows else []
            for row in block:
                notes = ["; ".join(row.notes)] if noted else []
                rows.append([row.label, *(cell.text() for cell in row.cells), *notes])
        return [*self.heads, *(["notes"] if noted else [])], rows

    def html(self) -> Markup:
        """Return it as an element of a page that scrolls by itself where the page is narrow."""
        return Markup(render("table.html", table=self))


def render(name: str, **values: Any) -> str:
    """Return a template of this folder with values, whose characters are those of a text and no markup."""
    return _templates().get_template(name).render(values)


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    found = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable)
    found.filters |= {"spread": spread_text, "counted": counted}
    found.filters["json"] = lambda value: json.dumps(value, indent=1, ensure_ascii=False, default=str)
    return found


def _printable(value: Any) -> Any:
    """Return a value for a page, without characters that a page may not have."""
    return value if isinstance(value, Markup) else re.sub(r"[^\S\n]|[\x00-\x08\x0b-\x1f\x7f]", " ", str(value))

"""Tables of a report, each written once and shown by the terminal and the page, and other parts of a page."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from xkfac.experiments.report.tables import number
from xkfac.experiments.runs.results import Spread


def spread_text(value: Spread | None, digits: int = 2) -> Markup:
    """Return mean and deviation as elements of a page."""
    mean, _, deviation = number(value, digits).partition(" ± ")
    mean = mean.replace("-", "−")  # noqa: RUF001, a minus sign is as wide as a digit
    # No-break spaces: a number and its deviation stay in one line of a text.
    return Markup(f'{mean}&nbsp;<span class="soft">±&nbsp;{deviation}</span>' if deviation else mean)


def counted(number_of: int, word: str) -> str:
    """Return a number with its word, in the plural if need be."""
    return f"{number_of} {word}" if number_of == 1 else f"{number_of} {word}s"


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
        return Markup(rendered("table.html", table=self))


def rendered(name: str, **values: Any) -> str:
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

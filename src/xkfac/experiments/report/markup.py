"""Tables of a report, each written once and shown by the terminal and the page, and other parts of a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from xkfac.experiments.report.tables import number
from xkfac.experiments.runs.results import Spread


def text(value: Any) -> str:
    """Return a value as text of a page, whatever characters it has."""
    return escape(re.sub(r"[^\S\n]|[\x00-\x08\x0b-\x1f\x7f]", " ", str(value)))


def spread_text(value: Spread | None, digits: int = 2) -> str:
    """Return mean and deviation as elements of a page."""
    mean, _, deviation = number(value, digits).partition(" ± ")
    mean = mean.replace("-", "−")  # noqa: RUF001, a minus sign is as wide as a digit
    # No-break spaces: a number and its deviation stay in one line of a text.
    return f'{mean}&nbsp;<span class="soft">±&nbsp;{deviation}</span>' if deviation else mean


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

    def html(self) -> str:
        """Return it as an element of a page, in bold if it is the best."""
        shown = text(self.value) if isinstance(self.value, str) else spread_text(self.value, self.digits)
        shown = f'<b>{shown}</b><span class="hidden"> (best)</span>' if self.best else shown
        return shown + (f'<br><span class="soft">{text(self.note)}</span>' if self.note else "")


@dataclass(frozen=True)
class Row:
    """A row of a table. notes: what a reader must know of it. reference: it is no competitor. below: a second line."""

    label: str
    cells: Sequence[Cell]
    notes: Sequence[str] = ()
    reference: bool = False
    below: str = ""

    def html(self, kinds: Sequence[str]) -> str:
        """Return it as an element of a page; the columns have classes."""
        opening = '<tr class="reference">' if self.reference else "<tr>"
        below = self.below or ("reference" if self.reference else "")
        label = text(self.label) + (f'<span class="soft">{text(below)}</span>' if below else "")
        label += "".join(f'<span class="warn">{text(note)}</span>' for note in self.notes)
        cells = (f"<td{kind}>{cell.html()}</td>" for kind, cell in zip(kinds, self.cells, strict=True))
        return f'{opening}<th scope="row">{label}</th>{"".join(cells)}</tr>'


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

    def html(self) -> str:
        """Return it as an element of a page that scrolls by itself where the page is narrow."""
        kinds = [' class="words"' if head in self.words else "" for head in self.heads]
        pairs = zip(kinds, self.heads, strict=True)
        heads = "".join(f'<th scope="col"{kind}>{text(head)}</th>' for kind, head in pairs)
        bodies = "\n".join(
            "<tbody>\n" + "\n".join(row.html(kinds[1:]) for row in block) + "\n</tbody>" for block in self.blocks
        )
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{self.name}"><table>'
            f"<caption><span>{text(self.caption)}</span></caption>\n<thead><tr>{heads}</tr></thead>\n{bodies}"
            "</table></div>"
        )

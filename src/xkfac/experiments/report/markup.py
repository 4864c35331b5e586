"""Parts of a report's page that several of its sections share."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def table(name: str, caption: str, head: str, *bodies: Iterable[str]) -> str:
    """Return a table that scrolls by itself where the page is narrow; head and bodies are rows of elements."""
    blocks = "\n".join("<tbody>\n" + "\n".join(rows) + "\n</tbody>" for rows in bodies)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table>'
        f"<caption><span>{caption}</span></caption>\n<thead><tr>{head}</tr></thead>\n{blocks}</table></div>"
    )


def table_row(label: str, cells: Iterable[str], remarks: Iterable[str] = (), *, reference: bool = False) -> str:
    """Return a row of a table: its label and cells as elements; remarks are text that a reader must know of it."""
    opening, said = ('<tr class="reference">', '<span class="soft">reference</span>') if reference else ("<tr>", "")
    warned = "".join(f'<span class="warn">{text(remark)}</span>' for remark in remarks)
    return (
        f'{opening}<th scope="row">{label}{said}{warned}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    )


def marked(cell: str, best: bool) -> str:
    """Return a cell, in bold if it is the best of its column."""
    return f'<b>{cell}</b><span class="hidden"> (best)</span>' if best else cell


def column_heads(titles: Iterable[str]) -> str:
    """Return the heads of columns."""
    return "".join(f'<th scope="col">{text(title)}</th>' for title in titles)

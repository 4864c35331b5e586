"""Accuracies of several methods task by task, in blocks with and without adaptive alpha (table 1 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from statistics import fmean

from xkfac.errors import XkfacError
from xkfac.experiments.report.tables import NOTHING, number, printable
from xkfac.experiments.runs.results import Spread, spread

MARK = "✓"
CAPTION = (
    "Top-1 accuracy in %, mean ± one standard deviation over repeats. The best of a column in each block is bold; "
    "references and methods with repeats that diverged do not take part."
)
_FACTS = ("active BN", "valid curvature", "adaptive α")  # noqa: RUF001, the paper's letter
_AVERAGE = "average"


@dataclass(frozen=True)
class AccuracyRow:
    """One row: a method, what it does, and what it reached.

    active_bn: BN learns and uses mini-batch statistics. valid_curvature: the curvature takes inter-example terms into
    account, or there are none. balanced: alpha_s and alpha_t adapt. accuracies: in %, by task. average: over all
    tasks. reference: the row is no competitor, as joint training. diverged: how many repeats did, and do not count.
    note: what else keeps the row from being a plain result.
    """

    method: str
    active_bn: bool
    valid_curvature: bool
    balanced: bool
    accuracies: Mapping[str, Spread | None] = field(default_factory=dict)
    average: Spread | None = None
    reference: bool = False
    diverged: int = 0
    note: str = ""

    @classmethod
    def of(
        cls,
        method: str,
        repeats: Sequence[Mapping[str, float]],
        *,
        active_bn: bool,
        valid_curvature: bool,
        balanced: bool,
        reference: bool = False,
    ) -> AccuracyRow:
        """Return the row of some repeats, each the accuracies by task; its average is over the tasks of each repeat.

        A repeat whose numbers are not all finite has diverged.

        Raises XkfacError for repeats of different tasks, whose averages would not be of the same thing.
        """
        whole = [repeat for repeat in repeats if all(map(math.isfinite, repeat.values()))]
        for one, other in pairwise(whole):
            if one.keys() != other.keys():
                raise XkfacError(
                    f"repeats of '{method}' have different tasks ({', '.join(one)} and {', '.join(other)}); "
                    "make a row of those with the same"
                )
        tasks = list(whole[0]) if whole else []
        return cls(
            method,
            active_bn,
            valid_curvature,
            balanced,
            {task: spread([repeat[task] for repeat in whole]) for task in tasks},
            spread([fmean(repeat.values()) for repeat in whole if repeat]),
            reference,
            len(repeats) - len(whole),
        )

    @property
    def name(self) -> str:
        """The method in one line, with its note, or else how many of its repeats diverged."""
        return printable(self.method) + (f" ({self.remark})" if self.remark else "")

    @property
    def remark(self) -> str:
        """What a reader must know of the row."""
        return self.note or (f"{self.diverged} diverged" if self.diverged else "")

    def cell(self, column: str | None) -> Spread | None:
        """Return the accuracy on a task, or the average for None; None where there is no finite number."""
        value = self.average if column is None else self.accuracies.get(column)
        return value if value is not None and math.isfinite(value.mean) else None


def as_markdown(rows: Sequence[AccuracyRow], digits: int = 2) -> str:
    """Return the table as Markdown, the best of each block in bold; a rule of dashes is between blocks."""
    head = _head(rows)
    lines = [head, ["---"] * 4 + ["---:"] * (len(head) - 4)]
    for place, block in enumerate(_blocks(rows)):
        if place:
            lines.append([NOTHING] + [""] * (len(head) - 1))
        for row, marks in zip(block, _marks(block, _tasks(rows), digits), strict=True):
            cells = [f"**{text}**" if best else text for text, best in _cells(row, rows, marks, digits)]
            lines.append([row.name, *_facts(row), *cells])
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def as_text(rows: Sequence[AccuracyRow], digits: int = 2) -> str:
    """Return the table as a terminal shows it: columns in line, a * at the best, an empty line between blocks."""
    lines: list[list[str]] = [_head(rows)]
    for block in _blocks(rows):
        lines.append([])
        for row, marks in zip(block, _marks(block, _tasks(rows), digits), strict=True):
            cells = [text + (" *" if best else "  ") for text, best in _cells(row, rows, marks, digits)]
            lines.append([row.name, *_facts(row), *cells])
    full = [line for line in lines if line]
    widths = [max(len(line[place]) for line in full) for place in range(len(lines[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() + "\n"
        for line in (lines[:1] + lines[2:])
    )


def as_html(rows: Sequence[AccuracyRow], digits: int = 2) -> str:
    """Return the table as an HTML element for a report's page, a body a block."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in _head(rows))
    bodies = []
    for block in _blocks(rows):
        marks = _marks(block, _tasks(rows), digits)
        inner = "\n".join(_html_row(row, rows, found, digits) for row, found in zip(block, marks, strict=True))
        bodies.append(f"<tbody>\n{inner}\n</tbody>")
    return (
        '<div class="scroll" role="region" tabindex="0" aria-label="Table of accuracies"><table>'
        f"<caption><span>{escape(CAPTION)}</span></caption>\n<thead><tr>{head}</tr></thead>\n"
        + "\n".join(bodies)
        + "</table></div>"
    )


def _html_row(row: AccuracyRow, rows: Sequence[AccuracyRow], marks: Sequence[bool], digits: int) -> str:
    facts = "".join(
        f'<td>{MARK}<span class="hidden"> yes</span></td>' if there else '<td><span class="hidden">no</span></td>'
        for there in (row.active_bn, row.valid_curvature, row.balanced)
    )
    cells = []
    for text, best in _cells(row, rows, marks, digits):
        mean, _, deviation = text.partition(" ± ")
        # No-break spaces: a number and its deviation stay in one line.
        shown = f'{mean}&nbsp;<span class="soft">±&nbsp;{deviation}</span>' if deviation else mean
        cells.append(f'<td><b>{shown}</b><span class="hidden"> (best)</span></td>' if best else f"<td>{shown}</td>")
    opening = '<tr class="reference">' if row.reference else "<tr>"
    said = '<span class="soft">reference</span>' if row.reference else ""
    remark = f'<span class="warn">{escape(row.remark)}</span>' if row.remark else ""
    return f'{opening}<th scope="row">{escape(printable(row.method))}{said}{remark}</th>{facts}{"".join(cells)}</tr>'


def _head(rows: Sequence[AccuracyRow]) -> list[str]:
    if not rows:
        raise XkfacError("a table of accuracies needs at least one row; wait until the first method is measured")
    return ["method", *_FACTS, *map(printable, _tasks(rows)), _AVERAGE]


def _tasks(rows: Sequence[AccuracyRow]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.accuracies))


def _blocks(rows: Sequence[AccuracyRow]) -> list[list[AccuracyRow]]:
    """Return the rows without adaptive alpha, then those with, as the paper has them; without empty blocks."""
    return [block for balanced in (False, True) if (block := [row for row in rows if row.balanced is balanced])]


def _facts(row: AccuracyRow) -> list[str]:
    return [MARK if there else "" for there in (row.active_bn, row.valid_curvature, row.balanced)]


def _marks(block: Sequence[AccuracyRow], tasks: Sequence[str], digits: int) -> list[list[bool]]:
    """Return for each row of a block where it is the best of a column, as far as the digits show."""
    columns = [_best(block, column, digits) for column in (*tasks, None)]
    return [[place in best for best in columns] for place in range(len(block))]


def _best(block: Sequence[AccuracyRow], column: str | None, digits: int) -> set[int]:
    values = {
        place: round(value.mean, digits)
        for place, row in enumerate(block)
        if not row.reference and not row.diverged and (value := row.cell(column)) is not None
    }
    if len(set(values.values())) < 2:
        return set()  # there is nothing to be better than
    top = max(values.values())
    return {place for place, value in values.items() if value == top}


def _cells(row: AccuracyRow, rows: Sequence[AccuracyRow], marks: Sequence[bool], digits: int) -> list[tuple[str, bool]]:
    """Return text and mark of each accuracy of a row."""
    columns = (*_tasks(rows), None)
    return [(number(row.cell(column), digits), best) for column, best in zip(columns, marks, strict=True)]

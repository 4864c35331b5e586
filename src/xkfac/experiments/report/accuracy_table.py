"""Accuracies of several methods task by task, in blocks with and without adaptive alpha (table 1 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xkfac.errors import XkfacError
from xkfac.experiments.report.markup import column_heads, marked, spread_text, table, table_row, text
from xkfac.experiments.report.tables import best_places, number, printable
from xkfac.experiments.runs.results import Spread

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

    @property
    def facts(self) -> tuple[bool, bool, bool]:
        """What the method does, in the order of the columns."""
        return self.active_bn, self.valid_curvature, self.balanced

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


def as_text(rows: Sequence[AccuracyRow], digits: int = 2) -> str:
    """Return the table as a terminal shows it: columns in line, a * at the best, an empty line between blocks."""
    blocks = [
        [
            [row.name, *(MARK if there else "" for there in row.facts)]
            + [number(value, digits) + (" *" if best else "  ") for value, best in cells]
            for row, cells in block
        ]
        for block in _blocks(rows, digits)
    ]
    head = _head(rows)
    widths = [max(map(len, column)) for column in zip(head, *(line for block in blocks for line in block), strict=True)]

    def written(line: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n"

    return written(head) + "\n".join("".join(map(written, block)) for block in blocks)


def as_html(rows: Sequence[AccuracyRow], digits: int = 2) -> str:
    """Return the table as an HTML element for a report's page, a body per block."""
    said = {True: f'{MARK}<span class="hidden"> yes</span>', False: '<span class="hidden">no</span>'}
    bodies = [
        [
            table_row(
                text(printable(row.method)),
                [said[there] for there in row.facts]
                + [marked(spread_text(value, digits), best) for value, best in cells],
                [row.remark] if row.remark else [],
                reference=row.reference,
            )
            for row, cells in block
        ]
        for block in _blocks(rows, digits)
    ]
    return table("Table of accuracies", text(CAPTION), column_heads(_head(rows)), *bodies)


def _head(rows: Sequence[AccuracyRow]) -> list[str]:
    if not rows:
        raise XkfacError("a table of accuracies needs at least one row; wait until the first method is measured")
    return ["method", *_FACTS, *map(printable, _tasks(rows)), _AVERAGE]


def _tasks(rows: Sequence[AccuracyRow]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.accuracies))


_Block = list[tuple[AccuracyRow, list[tuple[Spread | None, bool]]]]


def _blocks(rows: Sequence[AccuracyRow], digits: int) -> list[_Block]:
    """Return the rows without adaptive alpha, then those with, as the paper has them; without empty blocks.

    Beside each row stand its accuracies, the average last, and whether each is the best of its column in the block.
    """
    columns: list[str | None] = [*_tasks(rows), None]
    found = []
    for balanced in (False, True):
        block = [row for row in rows if row.balanced is balanced]
        rivals = {place: row for place, row in enumerate(block) if not row.reference and not row.diverged}
        marks = [best_places({p: row.cell(column) for p, row in rivals.items()}, digits) for column in columns]
        cells = [
            [(row.cell(column), place in best) for column, best in zip(columns, marks, strict=True)]
            for place, row in enumerate(block)
        ]
        found.append(list(zip(block, cells, strict=True)))
    return [block for block in found if block]

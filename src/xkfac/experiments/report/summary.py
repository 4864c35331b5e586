"""The summary of a report: the average accuracy of every line over the tasks, and how it comes about."""

from collections.abc import Sequence

from xkfac.experiments.report.markup import Cell, Row, Table
from xkfac.experiments.report.tables import ReportLine, best, columns, furthest

CAPTION = (
    "Average accuracy in % on the tasks learnt so far, after so many tasks, and how it comes about; mean ± one "
    "standard deviation over repeats. The best of a column is bold; references, lines that diverged and lines "
    "with fewer tasks do not take part."
)


def summary(lines: Sequence[ReportLine]) -> Table:
    """Return the headline numbers of every line."""
    shown, most = columns(lines), furthest(lines)
    marks = [best(column, lines) for column in shown]
    rows = []
    for position, line in enumerate(lines):
        cells = []
        for column, won in zip(shown, marks, strict=True):
            note = f"after {line.reached}" if column.title == f"after {most}" and 0 < line.reached < most else ""
            cells.append(Cell(column.value(line), column.digits, position in won, note))
        rows.append(Row(line.label, [*cells, Cell(str(len(line.results.jobs)))], line.notes, line.reference))
    heads = ["line", *(column.title for column in shown), "repeats"]
    return Table("Table of results", CAPTION, heads, [rows])

"""The summary of a report: the average accuracy of every line over the tasks, and how it comes about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from xkfac.experiments.report.lines import ReportLine, furthest
from xkfac.experiments.report.tables import Cell, Row, Table, best_places, csv_text, spread_cells
from xkfac.experiments.runs.results import JobResult, Spread

CHECKPOINTS = (5, 10, 20, 50, 100)
CAPTION = (
    "Average accuracy in % on the tasks learnt so far, after so many tasks, and how it comes about; mean ± one "
    "standard deviation over repeats. The best of a column is bold; references, lines that diverged and lines "
    "with fewer tasks do not take part."
)


@dataclass(frozen=True)
class Column:
    """A column of the summary: `better` is 1 where more is better, -1 where less is."""

    title: str
    hint: str
    value: Callable[[ReportLine], Spread | None] = field(repr=False)
    better: int = 1
    digits: int = 2


def columns(lines: Sequence[ReportLine]) -> list[Column]:
    """Return the columns of the summary that some line has a value for."""
    most = furthest(lines)

    def after(count: int) -> Column:
        hint = f"Average accuracy in % after {count} tasks"
        return Column(f"after {count}", hint, lambda e: e.averages.get(count))

    found = [
        *(after(count) for count in CHECKPOINTS if count < most),
        Column(f"after {most}" if most else "final", "Average accuracy in % after the last task", lambda e: e.final),
        Column(
            "forgetting",
            "How far earlier tasks are below their best, in points, after the last task",
            lambda e: e.at_the_end(lambda job: job.forgetting()[e.reached - 1]),
            better=-1,
        ),
        Column(
            "backward transfer",
            "Change of each task's accuracy from when it was learnt to the end, in points",
            lambda e: e.at_the_end(JobResult.backward_transfer),
        ),
        Column(
            "forward transfer",
            "Accuracy on a task just before it is learnt, less that of the untrained network, in points",
            # A head that is still to be trained says nothing of what the network knows already.
            lambda e: None if e.images else e.at_the_end(JobResult.forward_transfer),
        ),
        Column(
            "as learnt",
            "Accuracy in % on each task right after it was learnt",
            lambda e: e.at_the_end(JobResult.learning_accuracy),
        ),
        Column(
            "s / task",
            "Seconds for one task",
            lambda e: e.results.scalar(lambda job: fmean(job.seconds) if job.seconds else None),
            better=-1,
            digits=1,
        ),
    ]
    return [column for column in found if any(column.value(line) for line in lines)]


def best(column: Column, lines: Sequence[ReportLine]) -> set[int]:
    """Return the positions of the lines whose value of a column is the best.

    References are no competitors, and neither are lines with diverged repeats or with fewer tasks than others.
    """
    most = furthest(lines)
    rivals = [column.value(line) if line.competes and line.reached == most else None for line in lines]
    return best_places(rivals, column.digits, column.better)


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


def summary_csv(lines: Sequence[ReportLine]) -> str:
    """Return the summary as CSV, each number in full as mean and deviation."""
    shown = columns(lines)
    titles = [column.title.replace(" / ", "_per_").replace(" ", "_") for column in shown]
    header = ["run", "line", "label", "tasks", "of_tasks", "repeats"]
    header += [name for title in titles for name in (title, f"{title}_deviation")]
    body = (
        [
            *(line.run, line.name, line.label, line.reached, line.line.tasks, len(line.results.jobs)),
            *(cell for column in shown for cell in spread_cells(column.value(line))[:2]),
            "; ".join(line.notes),
        ]
        for line in lines
    )
    return csv_text([*header, "notes"], body)

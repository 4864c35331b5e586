"""The numbers of a report as plain data, shared by the terminal, the page and CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xkfac.experiments.recipes.recipe import UNPROTECTED, Line
from xkfac.experiments.runs.results import JobResult, LineResults, RunResults, Spread, spread

HUES = 7
CHECKPOINTS = (5, 10, 20, 50, 100)
NOTHING = "–"  # noqa: RUF001, an en dash is what a reader of a table expects in an empty cell

Curve = Callable[[JobResult], Sequence[float | None]]


@dataclass(frozen=True)
class ReportLine:
    """One line of one run, under the label that tells it apart from all others of a report.

    results: its jobs that have started, with what is not finite cut off. diverged: for each repeat that diverged, the
    tasks it had learnt before. index: its position among all entries, from which figures take its marker. hue: the
    number of its colour; lines of one figure have different ones as long as there are enough. images: whether the
    tasks are images, which have names, and heads of their own.
    """

    index: int
    run: str
    name: str
    label: str
    line: Line
    results: LineResults
    diverged: tuple[int, ...]
    repeats: int
    hue: int = 0
    images: bool = False

    @property
    def reference(self) -> bool:
        """Whether other lines are measured against the line and do not compete with it.

        Such are joint training, and a network of its own for each task.
        """
        return self.line.method in UNPROTECTED

    @property
    def order(self) -> tuple[str, ...] | None:
        """The names of tasks of images, where all repeats met them in one order."""
        orders = {tuple(job.tasks) for job in self.results.jobs if job.tasks}
        return next(iter(orders)) if self.images and len(orders) == 1 else None

    @property
    def reached(self) -> int:
        """The largest number of tasks after which some repeat was measured."""
        return max(map(tasks_measured, self.results.jobs), default=0)

    def curve(self, of: Curve) -> list[tuple[int, Spread]]:
        """Return (number of tasks, spread over repeats) wherever the curve was measured."""
        return [(count, value) for count, value in enumerate(self.results.curve(of), 1) if value is not None]


@dataclass(frozen=True)
class SummaryRow:
    """The headline numbers of one line.

    at: average accuracy after so many tasks. final: that after `reached` tasks, the last so far; it and the metrics
    below are taken over the repeats that got as far. notes: what keeps the row from being a plain result.
    """

    entry: ReportLine
    label: str
    repeats: int
    tasks: int
    reached: int
    at: dict[int, Spread]
    final: Spread | None
    forgetting: Spread | None
    backward_transfer: Spread | None
    forward_transfer: Spread | None
    learning_accuracy: Spread | None
    seconds: Spread | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of the summary: `better` is 1 where more is better, -1 where less is, 0 where neither."""

    title: str
    hint: str
    better: int
    value: Callable[[SummaryRow], Spread | None] = field(repr=False)
    digits: int = 2


def finite_part(job: JobResult, anew: bool = False) -> JobResult:
    """Return the job without the tasks from the one on where numbers ceased to be finite, which `diverged` then names.

    A diverged network still predicts some class, so accuracies after that task can look like numbers. Of a line that
    starts anew, as joint training for each number of tasks, what was measured before it diverged stands.
    """
    if anew and all(row is None or all(map(math.isfinite, row)) for row in job.accuracy):
        return job
    cut = job.diverged
    for task, row in enumerate(job.accuracy):
        if row is not None and not all(map(math.isfinite, row)):
            cut = task if cut is None else min(cut, task)
            break
    if cut is None:
        return job
    before = job.before[: max(cut - job.known, 0)]
    return replace(job, accuracy=job.accuracy[:cut], before=before, untrained=job.untrained[:cut], diverged=cut)


def started(job: JobResult) -> bool:
    """Return whether a job has left any trace."""
    return bool(job.accuracy or job.epochs or job.untrained or job.done)


def tasks_measured(job: JobResult) -> int:
    """Return the largest number of tasks after which the job was measured."""
    return max((count for count, row in enumerate(job.accuracy, 1) if row is not None), default=0)


def run_names(runs: Sequence[RunResults]) -> list[str]:
    """Return a short name for each run: its folder's, numbered where two are the same."""
    names = [printable(Path(run.folder).name) or run.recipe.name for run in runs]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name} ({seen[name]})" if names.count(name) > 1 else name)
    return unique


def entries(runs: Sequence[RunResults]) -> list[ReportLine]:
    """Return all lines of all runs, those without any result so far among them, with labels that do not collide."""
    found: list[ReportLine] = []
    for run, run_name in zip(runs, run_names(runs), strict=True):
        for name, line in run.recipe.lines.items():
            planned = run.lines.get(name, LineResults(name)).jobs
            jobs = [finite_part(job, line.method in UNPROTECTED) for job in planned if started(job)]
            diverged = tuple(sorted(job.diverged for job in jobs if job.diverged is not None))
            results = LineResults(name, jobs)
            label = printable(line.label or name)
            entry = ReportLine(len(found), run_name, name, label, line, results, diverged, len(planned))
            found.append(replace(entry, images=run.recipe.images is not None))
    found = _coloured(found, zip(runs, run_names(runs), strict=True))
    in_run = Counter((entry.run, entry.label) for entry in found)
    found = [replace(e, label=f"{e.label} ({e.name})") if in_run[e.run, e.label] > 1 else e for e in found]
    labels = Counter(entry.label for entry in found)
    return [replace(e, label=f"{e.run}: {e.label}") if labels[e.label] > 1 else e for e in found]


def _coloured(found: list[ReportLine], runs: Iterable[tuple[RunResults, str]]) -> list[ReportLine]:
    """Return entries with the first colour that no earlier line of a figure they are in has, or else the rarest."""
    figures = [{(run_name, name) for name in f.lines} for run, run_name in runs for f in run.recipe.figures.values()]
    hues: dict[tuple[str, str], int] = {}
    for entry in found:
        key = (entry.run, entry.name)
        beside = Counter(hues[other] for figure in figures if key in figure for other in figure & hues.keys())
        # References are drawn in ink, and take no colour from others.
        hues[key] = HUES if entry.reference else min(range(HUES), key=lambda hue: (beside[hue], hue))
    return [replace(entry, hue=hues[entry.run, entry.name]) for entry in found]


def notes(entry: ReportLine) -> tuple[str, ...]:
    """Return what a reader must know of a line's results: where it diverged, and what is still missing."""
    said = []
    if entry.diverged:
        tasks = sorted({before + 1 for before in entry.diverged})
        where = f"task {tasks[0]}" if len(tasks) == 1 else "tasks " + ", ".join(map(str, tasks))
        said.append(f"diverged at {where} ({len(entry.diverged)} of {entry.repeats} repeats)")
    jobs = entry.results.jobs
    running = [tasks_measured(job) for job in jobs if not job.done and job.diverged is None]
    if running:
        so_far = f"{min(running)} to {max(running)}" if min(running) < max(running) else f"{max(running)}"
        said.append(f"{so_far} of {entry.line.tasks} tasks so far")
    if not jobs:
        said.append("not started")
    elif len(jobs) < entry.repeats:
        said.append(f"{len(jobs)} of {entry.repeats} repeats so far")
    return tuple(said)


def summary(runs: Sequence[RunResults]) -> list[SummaryRow]:
    """Return the headline numbers of every line of the runs, in the order of the recipes."""
    return [_row(entry) for entry in entries(runs)]


def _row(entry: ReportLine) -> SummaryRow:
    reached = entry.reached
    averages = dict(entry.curve(JobResult.average_accuracy))
    # References learn no task after another: where they have all rows, they must not be read as if they did.
    in_sequence = [] if entry.reference else entry.results.jobs
    furthest = LineResults(entry.name, [job for job in in_sequence if reached and tasks_measured(job) == reached])
    return SummaryRow(
        entry=entry,
        label=entry.label,
        repeats=len(entry.results.jobs),
        tasks=entry.line.tasks,
        reached=reached,
        at={count: averages[count] for count in CHECKPOINTS if count in averages},
        final=averages.get(reached),
        forgetting=furthest.scalar(lambda job: job.forgetting()[reached - 1]),
        backward_transfer=furthest.scalar(JobResult.backward_transfer),
        # A head that is still to be trained says nothing of what the network knows already.
        forward_transfer=None if entry.images else furthest.scalar(_finite(JobResult.forward_transfer)),
        learning_accuracy=furthest.scalar(JobResult.learning_accuracy),
        seconds=entry.results.scalar(_seconds),
        notes=notes(entry),
    )


def _finite(of: Callable[[JobResult], float | None]) -> Callable[[JobResult], float | None]:
    def value(job: JobResult) -> float | None:
        number = of(job)
        return number if number is not None and math.isfinite(number) else None

    return value


def _seconds(job: JobResult) -> float | None:
    mean = spread([second for second in job.seconds if math.isfinite(second)])
    return None if mean is None else mean.mean


def columns(rows: Sequence[SummaryRow]) -> list[Column]:
    """Return the columns of the summary that some row has a value for."""
    most = max((row.reached for row in rows), default=0)
    found = [_checkpoint(count) for count in CHECKPOINTS if count < most]
    found += [
        Column(f"after {most}" if most else "final", "Average accuracy in % after the last task", 1, lambda r: r.final),
        Column(
            "forgetting",
            "How far earlier tasks are below their best, in points, after the last task",
            -1,
            lambda r: r.forgetting,
        ),
        Column(
            "backward transfer",
            "Change of each task's accuracy from when it was learnt to the end, in points",
            1,
            lambda r: r.backward_transfer,
        ),
        Column(
            "forward transfer",
            "Accuracy on a task just before it is learnt, less that of the untrained network, in points",
            1,
            lambda r: r.forward_transfer,
        ),
        Column("as learnt", "Accuracy in % on each task right after it was learnt", 1, lambda r: r.learning_accuracy),
        Column("s / task", "Seconds for one task", -1, lambda r: r.seconds, 1),
    ]
    return [column for column in found if any(column.value(row) for row in rows)]


def _checkpoint(count: int) -> Column:
    return Column(f"after {count}", f"Average accuracy in % after {count} tasks", 1, lambda row: row.at.get(count))


def best(column: Column, rows: Sequence[SummaryRow]) -> set[int]:
    """Return the positions of the rows whose value of a column is the best.

    References are no competitors, and neither are lines with diverged repeats or with fewer tasks than others.
    """
    most = max((row.reached for row in rows), default=0)
    rivals = {
        position: column.value(row)
        for position, row in enumerate(rows)
        if not row.entry.reference and not row.entry.diverged and row.reached == most
    }
    return best_places(rivals, column.digits, column.better) if column.better else set()


def best_places(values: Mapping[int, Spread | None], digits: int, better: int = 1) -> set[int]:
    """Return where the best of some values are, as far as digits show; nowhere if none is better than another."""
    shown = {place: round(value.mean, digits) for place, value in values.items() if value is not None}
    top = max(shown.values(), key=lambda value: better * value, default=None)
    return {place for place, value in shown.items() if value == top} if len(set(shown.values())) > 1 else set()


def number(value: Spread | None, digits: int = 2) -> str:
    """Return "mean ± deviation", the mean alone for a single repeat, or a dash."""
    if value is None:
        return NOTHING
    mean = f"{value.mean:.{digits}f}"
    return mean if math.isnan(value.deviation) else f"{mean} ± {value.deviation:.{digits}f}"


def summary_text(runs: Sequence[RunResults]) -> list[list[str]]:
    """Return the summary as rows of texts, its header first, as a terminal shows it; the best of a column has a *."""
    rows = summary(runs)
    shown = columns(rows)
    marks = [best(column, rows) for column in shown]
    most = max((row.reached for row in rows), default=0)
    lines = [["line", *(column.title for column in shown), "repeats", "notes"]]
    for position, row in enumerate(rows):
        cells = [
            number(c.value(row), c.digits) + (" *" if position in won else "")
            for c, won in zip(shown, marks, strict=True)
        ]
        remarks = [*row.notes, *([f"last column after {row.reached} tasks"] if 0 < row.reached < most else [])]
        lines.append([row.label, *cells, str(row.repeats), "; ".join(remarks)])
    return lines


def summary_csv(rows: Sequence[SummaryRow]) -> str:
    """Return the summary as CSV, each number in full as mean and deviation."""
    shown = columns(rows)
    header = ["run", "line", "label", "tasks", "of_tasks", "repeats"]
    for column in shown:
        title = column.title.replace(" / ", "_per_").replace(" ", "_")
        header += [title, f"{title}_deviation"]
    body = (
        [
            row.entry.run,
            row.entry.name,
            row.label,
            row.reached,
            row.tasks,
            row.repeats,
            *(cell for column in shown for cell in spread_cells(column.value(row))[:2]),
            "; ".join(row.notes),
        ]
        for row in rows
    )
    return csv_text([*header, "notes"], body)


def spread_cells(value: Spread | None) -> list[Any]:
    """Return mean, deviation and count as cells of a CSV file, empty where there is no number."""
    if value is None:
        return ["", "", 0]
    return [value.mean, "" if math.isnan(value.deviation) else value.deviation, value.count]


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a CSV file as text."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def printable(text: str) -> str:
    """Return a label in one line without characters that XML forbids."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

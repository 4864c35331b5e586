"""The lines of a report and their numbers, shared by the terminal, the page and CSV files."""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
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

    results: its jobs that have started. repeats: how many jobs there will be. index: its position among all entries,
    from which figures take its marker. hue: the number of its colour; lines of one figure have different ones as long
    as there are enough. images: whether the tasks are images, which have names, and heads of their own.
    """

    index: int
    run: str
    name: str
    label: str
    line: Line
    results: LineResults
    repeats: int
    images: bool
    hue: int = 0

    @property
    def reference(self) -> bool:
        """Whether other lines are measured against the line and do not compete with it.

        Such are joint training, and a network of its own for each task.
        """
        return self.line.method in UNPROTECTED

    @property
    def diverged(self) -> list[int]:
        """For each repeat that diverged, the tasks it had learnt before."""
        return sorted(job.diverged for job in self.results.jobs if job.diverged is not None)

    @property
    def order(self) -> tuple[str, ...] | None:
        """The names of tasks of images, where all repeats met them in one order."""
        orders = {tuple(job.tasks) for job in self.results.jobs if job.tasks}
        return next(iter(orders)) if self.images and len(orders) == 1 else None

    @cached_property
    def reached(self) -> int:
        """The largest number of tasks after which some repeat was measured."""
        return max(map(tasks_measured, self.results.jobs), default=0)

    def curve(self, of: Curve) -> list[tuple[int, Spread]]:
        """Return (number of tasks, spread over repeats) wherever the curve was measured."""
        return [(count, value) for count, value in enumerate(self.results.curve(of), 1) if value is not None]

    @cached_property
    def averages(self) -> dict[int, Spread]:
        """The average accuracy by the number of tasks after which it was measured."""
        return dict(self.curve(JobResult.average_accuracy))

    @property
    def final(self) -> Spread | None:
        """The average accuracy after the last task so far."""
        return self.averages.get(self.reached)

    def at_the_end(self, of: Callable[[JobResult], float | None]) -> Spread | None:
        """Return a metric over the repeats that got furthest; None of a reference.

        A reference does not learn one task after the other, so its rows say nothing about forgetting or transfer.
        """
        jobs = [] if self.reference else self.results.jobs
        return spread([of(job) for job in jobs if 0 < self.reached == tasks_measured(job)])

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of its results: where it diverged, and what is still missing."""
        said = []
        jobs = self.results.jobs
        if self.diverged:
            tasks = sorted({before + 1 for before in self.diverged})
            where = f"task {tasks[0]}" if len(tasks) == 1 else "tasks " + ", ".join(map(str, tasks))
            said.append(f"diverged at {where} ({len(self.diverged)} of {self.repeats} repeats)")
        running = [tasks_measured(job) for job in jobs if not job.done and job.diverged is None]
        if running:
            so_far = f"{min(running)} to {max(running)}" if min(running) < max(running) else f"{max(running)}"
            said.append(f"{so_far} of {self.line.tasks} tasks so far")
        if not jobs:
            said.append("not started")
        elif len(jobs) < self.repeats:
            said.append(f"{len(jobs)} of {self.repeats} repeats so far")
        return tuple(said)


@dataclass(frozen=True)
class Column:
    """A column of the summary: `better` is 1 where more is better, -1 where less is."""

    title: str
    hint: str
    better: int
    value: Callable[[ReportLine], Spread | None] = field(repr=False)
    digits: int = 2


def started(job: JobResult) -> bool:
    """Return whether a job has left any trace."""
    return bool(job.accuracy or job.epochs or job.untrained or job.done)


def tasks_measured(job: JobResult) -> int:
    """Return the largest number of tasks after which the job was measured."""
    return max((count for count, row in enumerate(job.accuracy, 1) if row is not None), default=0)


def run_names(runs: Sequence[RunResults]) -> list[str]:
    """Return a short name for each run: its folder's, numbered where two are the same."""
    names = [printable(Path(run.folder).name) or run.recipe.name for run in runs]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def entries(runs: Sequence[RunResults]) -> list[ReportLine]:
    """Return all lines of all runs, those without any result so far among them, with labels that do not collide."""
    found: list[ReportLine] = []
    for run, run_name in zip(runs, run_names(runs), strict=True):
        for name, line in run.recipe.lines.items():
            planned = run.lines.get(name, LineResults(name)).jobs
            results = LineResults(name, [job for job in planned if started(job)])
            label, images = printable(line.label or name), run.recipe.images is not None
            found.append(ReportLine(len(found), run_name, name, label, line, results, len(planned), images))
    found = _coloured(found, zip(runs, run_names(runs), strict=True))
    in_run = Counter((entry.run, entry.label) for entry in found)
    found = [replace(e, label=f"{e.label} ({e.name})") if in_run[e.run, e.label] > 1 else e for e in found]
    labels = Counter(entry.label for entry in found)
    return [replace(e, label=f"{e.run}: {e.label}") if labels[e.label] > 1 else e for e in found]


def entries_by_run(runs: Sequence[RunResults]) -> list[list[ReportLine]]:
    """Return the same lines, those of each run by themselves."""
    every = entries(runs)
    return [[entry for entry in every if entry.run == name] for name in run_names(runs)]


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


def columns(lines: Sequence[ReportLine]) -> list[Column]:
    """Return the columns of the summary that some line has a value for."""
    most = furthest(lines)

    def after(count: int) -> Column:
        hint = f"Average accuracy in % after {count} tasks"
        return Column(f"after {count}", hint, 1, lambda e: e.averages.get(count))

    found = [after(count) for count in CHECKPOINTS if count < most]
    found += [
        Column(f"after {most}" if most else "final", "Average accuracy in % after the last task", 1, lambda e: e.final),
        Column(
            "forgetting",
            "How far earlier tasks are below their best, in points, after the last task",
            -1,
            lambda e: e.at_the_end(lambda job: job.forgetting()[e.reached - 1]),
        ),
        Column(
            "backward transfer",
            "Change of each task's accuracy from when it was learnt to the end, in points",
            1,
            lambda e: e.at_the_end(JobResult.backward_transfer),
        ),
        Column(
            "forward transfer",
            "Accuracy on a task just before it is learnt, less that of the untrained network, in points",
            1,
            # A head that is still to be trained says nothing of what the network knows already.
            lambda e: None if e.images else e.at_the_end(JobResult.forward_transfer),
        ),
        Column(
            "as learnt",
            "Accuracy in % on each task right after it was learnt",
            1,
            lambda e: e.at_the_end(JobResult.learning_accuracy),
        ),
        Column(
            "s / task",
            "Seconds for one task",
            -1,
            lambda e: e.results.scalar(lambda job: fmean(job.seconds) if job.seconds else None),
            1,
        ),
    ]
    return [column for column in found if any(column.value(line) for line in lines)]


def furthest(lines: Iterable[ReportLine]) -> int:
    """Return the largest number of tasks that a line has reached."""
    return max((line.reached for line in lines), default=0)


def best(column: Column, lines: Sequence[ReportLine]) -> set[int]:
    """Return the positions of the lines whose value of a column is the best.

    References are no competitors, and neither are lines with diverged repeats or with fewer tasks than others.
    """
    rivals = {
        position: column.value(line)
        for position, line in enumerate(lines)
        if not line.reference and not line.diverged and line.reached == furthest(lines)
    }
    return best_places(rivals, column.digits, column.better)


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


def summary_csv(lines: Sequence[ReportLine]) -> str:
    """Return the summary as CSV, each number in full as mean and deviation."""
    shown = columns(lines)
    header = ["run", "line", "label", "tasks", "of_tasks", "repeats"]
    for column in shown:
        title = column.title.replace(" / ", "_per_").replace(" ", "_")
        header += [title, f"{title}_deviation"]
    body = (
        [
            *(line.run, line.name, line.label, line.reached, line.line.tasks, len(line.results.jobs)),
            *(cell for column in shown for cell in spread_cells(column.value(line))[:2]),
            "; ".join(line.notes),
        ]
        for line in lines
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

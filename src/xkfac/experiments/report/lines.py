"""The lines of a report: those of all its runs, under labels and in colours that tell them apart."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from xkfac.experiments.recipes.recipe import UNPROTECTED, Line, Recipe
from xkfac.experiments.report.tables import printable
from xkfac.experiments.runs.results import JobResult, LineResults, RunResults, Spread, spread

HUES = 7

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
    def competes(self) -> bool:
        """Whether the line can be the best: it is no reference, and no repeat diverged."""
        return not self.reference and not self.diverged

    @property
    def order(self) -> tuple[str, ...] | None:
        """The names of tasks of images, where all repeats met them in one order."""
        orders = {tuple(job.tasks) for job in self.results.jobs if job.tasks}
        return next(iter(orders)) if self.images and len(orders) == 1 else None

    @cached_property
    def reached(self) -> int:
        """The largest number of tasks after which some repeat was measured."""
        return max(self.averages, default=0)

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

    @cached_property
    def ends(self) -> dict[str, dict[int, float]]:
        """The accuracy on each task by the seed of each repeat that has learnt all tasks."""
        ends: dict[str, dict[int, float]] = {}
        for job in self.results.jobs:
            for task, accuracy in (job.final() or {}).items():
                ends.setdefault(task, {})[job.seed] = accuracy
        return ends

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
class ReportRun:
    """A run of a report: its name, which no other run of it has, what it measured, and its lines."""

    name: str
    results: RunResults
    lines: Sequence[ReportLine]

    @property
    def recipe(self) -> Recipe:
        """What was run."""
        return self.results.recipe


def report_runs(runs: Sequence[RunResults]) -> list[ReportRun]:
    """Return runs with all their lines, those without any result so far among them, under labels that differ."""
    names = run_names(runs)
    found: list[ReportLine] = []
    for run, run_name in zip(runs, names, strict=True):
        recipe, hues = run.recipe, _hues(run.recipe)
        labels = {name: printable(line.label or name) for name, line in recipe.lines.items()}
        count = Counter(labels.values())
        for name, line in recipe.lines.items():
            label = f"{labels[name]} ({name})" if count[labels[name]] > 1 else labels[name]
            planned = run.lines.get(name, LineResults(name)).jobs
            results, images = LineResults(name, [job for job in planned if started(job)]), recipe.images is not None
            place = len(found)
            found.append(ReportLine(place, run_name, name, label, line, results, len(planned), images, hues[name]))
    count = Counter(entry.label for entry in found)
    found = [replace(e, label=f"{e.run}: {e.label}") if count[e.label] > 1 else e for e in found]
    return [
        ReportRun(name, run, [entry for entry in found if entry.run == name])
        for run, name in zip(runs, names, strict=True)
    ]


def run_names(runs: Sequence[RunResults]) -> list[str]:
    """Return a short name for each run: its folder's, numbered where two are the same."""
    names = [printable(Path(run.folder).name) or run.recipe.name for run in runs]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _hues(recipe: Recipe) -> dict[str, int]:
    """Return the first colour of each line that no earlier line of a figure it is in has, or else the rarest."""
    figures = [set(figure.lines) for figure in recipe.figures.values()]
    hues: dict[str, int] = {}
    for name, line in recipe.lines.items():
        beside = Counter(hues[other] for figure in figures if name in figure for other in figure & hues.keys())
        # References are drawn in ink, and take no colour from others.
        reference = line.method in UNPROTECTED
        hues[name] = HUES if reference else min(range(HUES), key=lambda hue: (beside[hue], hue))
    return hues


def started(job: JobResult) -> bool:
    """Return whether a job has left any trace."""
    return bool(job.accuracy or job.epochs or job.untrained or job.done)


def tasks_measured(job: JobResult) -> int:
    """Return the largest number of tasks after which the job was measured."""
    return max((count for count, row in enumerate(job.accuracy, 1) if row is not None), default=0)


def furthest(lines: Iterable[ReportLine]) -> int:
    """Return the largest number of tasks that a line has reached."""
    return max((line.reached for line in lines), default=0)

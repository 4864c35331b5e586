"""How far a run is, for a person who watches it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from xkfac.errors import XkfacError
from xkfac.experiments.recipes.recipe import Line, Recipe
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job_folder import JobFolder
from xkfac.experiments.runs.results import JobResult


@dataclass(frozen=True)
class RunStatus:
    """How far a run is."""

    run: str
    recipe: str
    state: str
    jobs_done: int
    jobs: int
    epochs_done: int
    epochs: int
    accuracy: float | None
    diverged: int = 0
    reason: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return how far the run in a folder is; a damaged one is said to be so, and why in `reason`."""
        try:
            run = RunFolder.open(path)
            return cls.from_results(run, [job.result() for job in run.jobs()])
        except XkfacError as error:
            return cls(str(path), "?", "damaged", 0, 0, 0, 0, None, reason=str(error))

    @classmethod
    def from_results(cls, run: RunFolder, results: Sequence[JobResult]) -> Self:
        """Return how far a run is whose jobs have these results."""
        done = sum(job.done for job in results)
        state = "complete" if done == len(results) else "running" if run.in_use() else "interrupted"
        latest = [curve[-1] for job in results if (curve := job.average_accuracy())]
        known = [value for value in latest if value is not None]
        epochs = sum(epochs_of(run.recipe, job.line) for job in results)
        passed = sum(epochs_of(run.recipe, job.line) if job.done else len(job.epochs) for job in results)
        accuracy = sum(known) / len(known) if known else None
        diverged = sum(job.diverged is not None for job in results)
        return cls(str(run.path), run.recipe.name, state, done, len(results), passed, epochs, accuracy, diverged)

    def cells(self) -> list[str]:
        """Return the cells of its row in a table."""
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.2f}"
        return [
            self.run,
            self.recipe,
            self.state,
            f"{self.jobs_done}/{self.jobs}" + (f", {self.diverged} diverged" if self.diverged else ""),
            f"{self.epochs_done}/{self.epochs}",
            accuracy,
        ]


def epochs_of(recipe: Recipe, name: str) -> int:
    """Return the epochs of a whole job of a line; the source of images is known from the start."""
    line = recipe.lines[name]
    return (len(line.counts) - (recipe.images is not None)) * line.epochs


class LiveDisplay:
    """What work in progress is shown with: on a terminal lines that change in place, elsewhere one now and then."""

    _pause = 30.0

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live = Live(console=console, transient=True) if console.is_terminal else None
        self._written = clock()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def _due(self) -> bool:
        """Whether something is to be shown now."""
        return self._live is not None or self._clock() - self._written >= self._pause

    def _show(self, head: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Show a line about the whole, and on a terminal a table below it."""
        self._written = self._clock()
        if self._live is not None:
            table = Table(head, *columns, box=None, pad_edge=False)
            for row in rows:
                table.add_row(*map(escape, row))
            self._live.update(table)
        else:
            self._console.print(escape(head), soft_wrap=True)


class Display(LiveDisplay):
    """Shows a run while it works: every job with its task, epoch and accuracy so far, and the time that is left."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._start = self._written
        self._first: int | None = None
        self._done: dict[Path, JobResult] = {}

    def show(self, run: RunFolder, running: list[JobFolder]) -> None:
        """Show a run and the jobs that are running."""
        if self._due:
            results = {job.path: self._done.get(job.path) or job.result() for job in run.jobs()}
            self._done = {path: result for path, result in results.items() if result.done}
            rows = [_job_cells(run.recipe.lines[job.line], results[job.path]) for job in running]
            head = self._head(RunStatus.from_results(run, list(results.values())))
            self._show(head, ("task", "epoch", "validation", "average so far"), rows)

    def _head(self, run: RunStatus) -> str:
        """Return the line about the whole run."""
        if self._first is None:
            self._first = run.epochs_done
        head = f"{run.recipe}: {run.jobs_done}/{run.jobs} jobs, {run.epochs_done}/{run.epochs} epochs"
        since, new = self._clock() - self._start, run.epochs_done - self._first
        return f"{head}, {_duration(since / new * (run.epochs - run.epochs_done))} left" if new > 0 else head


def _job_cells(line: Line, result: JobResult) -> list[str]:
    name = f"{line.label}, seed {result.seed}"
    if not result.epochs:
        return [name, "-", "-", "-", "-"]
    last = result.epochs[-1]
    averages = [value for value in result.average_accuracy() if value is not None]
    return [
        name,
        f"{last['task'] + 1}/{line.tasks}",
        f"{last['epoch'] + 1}/{line.epochs}",
        f"{last['validation']:.2f}",
        f"{averages[-1]:.2f}" if averages else "-",
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

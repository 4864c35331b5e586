"""What a run has measured, and the metrics of continual learning that follow from it."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from xkfac.experiments.recipes.recipe import Figure, Recipe

Row = Sequence[float]


@dataclass(frozen=True)
class JobResult:
    """What one job measured: one line of a recipe with one seed. Accuracies are percentages on the test parts.

    tasks: the names of the tasks in their order. accuracy: after each task t the accuracies on tasks 0 to t; None where
    it was not measured, as for joint training. before: the accuracy on each task just before it was learnt, without
    those that the initial network knew. untrained: that of the initial network.
    epochs: for each epoch its task, epoch, lr, mean loss and penalty, validation accuracy. kept: the epoch of each task
    whose weights were kept. seconds: the time of each task. diverged: the task at which numbers ceased to be finite.
    inference: of each task after the last one, accuracy with the task `given` and `inferred`, and how often its test
    images are `taken` for each task, in %; empty where tasks share all layers.
    """

    line: str
    seed: int
    accuracy: Sequence[Row | None] = ()
    before: Row = ()
    untrained: Row = ()
    epochs: Sequence[Mapping[str, Any]] = ()
    kept: Sequence[int] = ()
    seconds: Row = ()
    diverged: int | None = None
    done: bool = False
    tasks: Sequence[str] = ()
    inference: Sequence[Mapping[str, Any]] = ()

    def average_accuracy(self) -> list[float | None]:
        """Return the average accuracy over the tasks learnt so far, after each task."""
        return [None if row is None else statistics.fmean(row) for row in self.accuracy]

    def forgetting(self) -> list[float | None]:
        """Return, after each task, how far accuracies on earlier tasks are below their best so far, on average."""
        curve: list[float | None] = []
        for count, row in enumerate(self.accuracy):
            past = [earlier for earlier in self.accuracy[:count] if earlier is not None]
            if row is None or not past or len(past) < count:
                curve.append(None)
            else:
                lost = (max(earlier[task] for earlier in past[task:]) - row[task] for task in range(count))
                curve.append(statistics.fmean(lost))
        return curve

    def backward_transfer(self) -> float | None:
        """Return how the final accuracies on earlier tasks differ from those right after learning them, on average."""
        rows = [row for row in self.accuracy if row is not None]
        if len(rows) != len(self.accuracy) or len(rows) < 2:
            return None
        return statistics.fmean(rows[-1][i] - rows[i][i] for i in range(len(rows) - 1))

    def forward_transfer(self) -> float | None:
        """Return how much better than the initial network it is on tasks just before learning them, on average."""
        pairs = list(zip(self.before, self.untrained[self.known :], strict=False))[0 if self.known else 1 :]
        return statistics.fmean(a - b for a, b in pairs) if pairs else None

    @property
    def known(self) -> int:
        """How many of its tasks the job did not learn: the initial network knew them."""
        return max(len(self.accuracy) - len(self.before), 0)

    def final(self) -> dict[str, float] | None:
        """Return the accuracy on each task by its name after the last one, None before that or where it diverged."""
        if self.diverged is not None or not self.tasks or len(self.accuracy) < len(self.tasks):
            return None
        row = self.accuracy[-1]
        return None if row is None else dict(zip(self.tasks, row, strict=True))

    def learning_accuracy(self) -> float | None:
        """Return the accuracy on each task right after it was learnt, on average."""
        rows = [row for row in self.accuracy if row is not None]
        return statistics.fmean(row[-1] for row in rows) if rows and len(rows) == len(self.accuracy) else None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over `count` repeats; the deviation of a single one is not a number."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if math.isnan(self.deviation) else f"{self.mean:.2f} ± {self.deviation:.2f}"


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean and sample standard deviation of the values that are there, or None without any."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return Spread(statistics.fmean(present), statistics.stdev(present) if len(present) > 1 else math.nan, len(present))


@dataclass(frozen=True)
class LineResults:
    """The repeats of one line."""

    name: str
    jobs: Sequence[JobResult] = ()

    def curve(self, of: Callable[[JobResult], Sequence[float | None]]) -> list[Spread | None]:
        """Return the spread over repeats of a curve such as `JobResult.average_accuracy`, task by task."""
        return [spread(values) for values in zip_longest(*map(of, self.jobs))]

    def scalar(self, of: Callable[[JobResult], float | None]) -> Spread | None:
        """Return the spread over repeats of a number such as `JobResult.backward_transfer`."""
        return spread([of(job) for job in self.jobs])


@dataclass(frozen=True)
class RunResults:
    """All that a run has measured so far, with the recipe and where it ran.

    folder: that of the run. others: those of the runs that were pooled with it.
    """

    folder: str
    recipe: Recipe
    provenance: Mapping[str, Any]
    lines: Mapping[str, LineResults] = field(default_factory=dict)
    others: Sequence[str] = ()


def pooled(runs: Sequence[RunResults]) -> list[RunResults]:
    """Return runs of one recipe that differ in their seeds or lines as a single one, with the repeats of all of them.

    Such runs have the same name and data, or images and tasks, and all are tuned or none is; a line that several have
    has the same settings in all, but other seeds.
    """
    groups: list[list[RunResults]] = []
    for run in runs:
        group = next((group for group in groups if all(_poolable(run, other) for other in group)), [])
        if not group:
            groups.append(group)
        group.append(run)
    return [group[0] if len(group) == 1 else _as_one(group) for group in groups]


def _poolable(a: RunResults, b: RunResults) -> bool:
    worlds = [(r.recipe.name, *r.recipe.world, r.recipe.tasks, "tuning" in r.provenance) for r in (a, b)]
    return worlds[0] == worlds[1] and all(
        a.recipe.lines[name] == b.recipe.lines[name]
        and {job.seed for job in a.lines[name].jobs}.isdisjoint(job.seed for job in b.lines[name].jobs)
        for name in a.lines.keys() & b.lines.keys()
    )


def _as_one(runs: Sequence[RunResults]) -> RunResults:
    # The run with the most lines has most of the recipe's order.
    runs = sorted(runs, key=lambda run: -len(run.lines))
    first = runs[0]
    names = dict.fromkeys(name for run in runs for name in run.lines)
    jobs = {name: [job for run in runs if name in run.lines for job in run.lines[name].jobs] for name in names}
    lines = {name: LineResults(name, sorted(of, key=lambda job: job.seed)) for name, of in jobs.items()}
    settings = {name: next(run.recipe.lines[name] for run in runs if name in run.recipe.lines) for name in names}
    figures: dict[str, Figure] = {}
    for key, figure in (item for run in runs for item in run.recipe.figures.items()):
        known = figures.setdefault(key, figure)
        figures[key] = replace(known, lines=tuple(dict.fromkeys((*known.lines, *figure.lines))))
    repeats = sum(run.recipe.repeats for run in runs)
    recipe = replace(first.recipe, lines=settings, figures=figures, repeats=repeats)
    keys = dict.fromkeys(key for run in runs for key in run.provenance)
    facts = {key: "; ".join(dict.fromkeys(str(run.provenance.get(key, "-")) for run in runs)) for key in keys}
    return RunResults(first.folder, recipe, facts, lines, tuple(run.folder for run in runs[1:]))

"""How far a tuning is, for a person who watches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.progress import LiveDisplay
from xkfac.experiments.tuning.trials import TunedJob, grid_of, ranked, tuned_jobs
from xkfac.experiments.tuning.tuner import Phase, phase_done


@dataclass(frozen=True)
class TuningStatus:
    """How far the tuning of a run is."""

    name: str
    phase: Phase
    jobs_done: int
    jobs: int
    trials_done: int
    trials: int
    rows: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, run: RunFolder, phase: Phase) -> TuningStatus:
        """Return how far it is, with a row for each job that is at a task."""
        jobs = tuned_jobs(run)
        done, rows = 0, []
        for job in jobs:
            ended = max(len(job.choices()) - 1, 0)
            done += ended * len(grid_of(job.line))
            if phase == "choose" and not job.chosen():
                count, row = _row(job)
                done += count
                rows.append(row)
        total = sum(len(grid_of(job.line)) * (job.line.tasks - 1) for job in jobs)
        finished = sum(phase_done(job, phase) for job in jobs)
        return cls(run.recipe.name, phase, finished, len(jobs), done, total, rows)

    def __str__(self) -> str:
        doing = {"prepare": "preparing", "choose": "choosing", "measure": "measuring"}[self.phase]
        trials = f", {self.trials_done}/{self.trials} trials" if self.phase == "choose" else ""
        return f"{self.name}: {doing}, {self.jobs_done}/{self.jobs} jobs{trials}"


def _row(job: TunedJob) -> tuple[int, tuple[str, ...]]:
    """Return how many trials of the current task of a job have ended, and its row: task, trials, best so far."""
    task, line = len(job.choices()), job.line
    numbers = range(len(grid_of(line)))
    outcomes = [each for each in (job.stage(task).trial(number).outcome() for number in numbers) if each is not None]
    best = next(iter(ranked(outcomes)), None)
    said = "-" if best is None else f"{best.validation:.2f} ({best.point})"
    row = (f"{line.label}, seed {job.folder.seed}", f"{task + 1}/{line.tasks}", f"{len(outcomes)}/{len(numbers)}", said)
    return len(outcomes), row


class TuningDisplay(LiveDisplay):
    """Shows a tuning while it works: for every job its task, how many trials have ended, and the best so far."""

    def show(self, status: TuningStatus) -> None:
        """Show how far a tuning is."""
        if self._due:
            self._show(str(status), ("task", "trials", "best so far"), status.rows)
